//! Enables the scheduler's locks (`cfg(schedules)`) in this crate only.

fn main() {
    println!("cargo::rustc-cfg=schedules");
    println!("cargo::rerun-if-changed=build.rs");
}
