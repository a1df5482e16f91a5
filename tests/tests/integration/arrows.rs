//! Dependencies between crates point one way: each stands on what ARCHITECTURE says, and on nothing else.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// What stands on what, by name.
type Arrows = BTreeMap<String, BTreeSet<String>>;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// As `cargo metadata` knows it: what a crate is built with, but for its tests and its build script.
fn built() -> Arrows {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).current_dir(root());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |package: &Value| {
        let dependencies = package["dependencies"].as_array().unwrap();
        let ours = dependencies.iter().filter(|one| one["kind"].is_null() && !one["path"].is_null());
        (text(&package["name"]), ours.map(|one| text(&one["name"])).collect())
    };
    packages.iter().map(of).collect()
}

/// As the table of ARCHITECTURE has it: folder, crate, what it stands on.
fn drawn() -> Arrows {
    let page = std::fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let rows = page.lines().skip_while(|line| !line.starts_with("| folder | crate | stands on |")).skip(2);
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<String>>();
    let rows = rows.take_while(|line| line.starts_with('|')).map(cells).filter(|row| !row[2].is_empty());
    let names = |cell: &str| {
        cell.split(", ").filter(|name| !name.is_empty()).map(|name| format!("glake-{name}")).collect()
    };
    rows.map(|row| (row[2].clone(), names(&row[3]))).collect()
}

#[test]
fn crates_stand_on_what_the_architecture_says() {
    assert_eq!(built(), drawn());
}
