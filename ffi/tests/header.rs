//! The checked-in header equals cbindgen's output, and declares the same functions as `glake-abi`. `GLAKE_WRITE_HEADER=1 cargo test -p
//! glake-ffi --test header` regenerates it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use glake_device::Stream;
use glake_runtime::config::{Environment, Sources};
use glake_runtime::process::{Process, Refill, RegionView, Shrink};
use glake_tiers::RegionOptions;
use glake_units::Bytes;

#[test]
fn the_header_is_written_from_the_code() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let bindings = cbindgen::generate(crate_folder).unwrap();
    let mut written = Vec::new();
    bindings.write(&mut written);
    let file = crate_folder.join("include/gmlake.h");
    if std::env::var_os("GLAKE_WRITE_HEADER").is_some() {
        fs::write(&file, &written).unwrap();
    }
    let there = fs::read(&file).unwrap();
    assert!(there == written, "{} is not what the code says: run make header", file.display());
}

#[allow(clippy::unwrap_used)]
fn header() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/gmlake.h")).unwrap()
}

/// Returns the header's description of a function.
#[allow(clippy::unwrap_used)]
fn told_of(name: &str) -> String {
    let header = header();
    let end = header.find(&format!("{name}(")).unwrap();
    let begin = header[..end].rfind("\n\n").unwrap();
    header[begin..end].to_owned()
}

/// Collects the keys of JSON, except those below `but`, which are data.
fn keys(of: &serde_json::Value, but: &str, found: &mut BTreeSet<String>) {
    match of {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                found.insert(key.clone());
                if key != but {
                    keys(value, but, found);
                }
            }
        }
        serde_json::Value::Array(parts) => parts.iter().for_each(|part| keys(part, but, found)),
        _ => {}
    }
}

#[test]
fn every_field_of_a_report_is_told() {
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let overrides = "tiers.host_spare = 0\ntransfer.calibrations = \"\"\n";
    let config = Sources { environment, ..Sources::default() }
        .with_overrides("test", overrides)
        .unwrap()
        .load()
        .unwrap();
    let process = Process::start(config).unwrap();
    let options = RegionOptions { clean: true, ..RegionOptions::of("weights") };
    process.regions().define(options).unwrap();
    process.regions().enter("weights").unwrap();
    let block = process.malloc(0, Bytes::mib(40), Stream(0)).unwrap();
    let fixed = process.malloc(0, Bytes::mib(40), Stream(0)).unwrap();
    process.regions().leave().unwrap();
    process.regions().fix(fixed, true).unwrap();
    let shrunk = process.regions().shrink(&Shrink::default()).unwrap().json();
    let views = process.regions().views().unwrap().iter().map(RegionView::json).collect();
    let some = Refill { bytes: Some(Bytes::new(1)), ..Refill::default() };
    let refilled = process.regions().refill(&some).unwrap().json();
    for (function, told) in
        [("glake_shrink", shrunk), ("glake_refill", refilled), ("glake_regions_json", views)]
    {
        let (text, mut found) = (told_of(function), BTreeSet::new());
        keys(&told, "places", &mut found);
        let untold: Vec<_> = found.iter().filter(|key| !text.contains(&format!("\"{key}\""))).collect();
        assert!(untold.is_empty() && found.len() > 4, "{function} does not tell of {untold:?}");
    }
    process.regions().fix(fixed, false).unwrap();
    for block in [block, fixed] {
        process.free(block).unwrap();
    }
}

/// Programs that open the library can only find declared functions; torch finds its own names by itself.
#[test]
fn every_function_of_the_header_is_declared_once_for_all() {
    let header = header();
    let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words =
        code.flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '(')));
    let defined = words.filter_map(|word| word.split_once('(').map(|(name, _)| name));
    let defined: BTreeSet<&str> = defined.filter(|name| name.starts_with("glake_")).collect();
    let declared = glake_abi::NAMES.iter().copied().filter(|name| name.starts_with("glake_"));
    assert_eq!(defined, declared.collect());
}
