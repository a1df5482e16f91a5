//! The command as a person runs it: one binary, because each costs seconds to build.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

mod checkpoint;
mod command;
mod product;
mod rights;
mod run;
mod supervise;
mod systemd;
mod top;

/// A file in a folder with the first two GPUs of h200x4: calibration takes a fifth of the time.
fn two_gpus(folder: &std::path::Path) -> String {
    let four =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/topologies/h200x4.toml"));
    let mut gpus = 0;
    let is_kept = |line: &&str| {
        gpus += usize::from(line.trim_start().starts_with("{ name"));
        !line.trim_start().starts_with("{ name") || gpus <= 2
    };
    let two: Vec<String> = four.unwrap().lines().filter(is_kept).map(str::to_owned).collect();
    let path = folder.join("two.toml");
    std::fs::write(&path, two.join("\n").replace("\"h200x4\"", "\"h200x2\"")).unwrap();
    format!("sim:{}", path.display())
}
