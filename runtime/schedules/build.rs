//! Locks are the scheduler's in this crate, and in no other.

fn main() {
    println!("cargo::rustc-cfg=schedules");
    println!("cargo::rerun-if-changed=build.rs");
}
