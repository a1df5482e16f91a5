//! The checked-in header is what cbindgen writes, and declares what `glake-abi` does. `GLAKE_WRITE_HEADER=1 cargo test -p glake-ffi --test header` writes it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

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

/// What is not declared there, nobody finds in an open library; but for torch's own names, which torch finds.
#[test]
fn every_function_of_the_header_is_declared_once_for_all() {
    let header = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/gmlake.h")).unwrap();
    let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words =
        code.flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '(')));
    let defined = words.filter_map(|word| word.split_once('(').map(|(name, _)| name));
    let defined: BTreeSet<&str> = defined.filter(|name| name.starts_with("glake_")).collect();
    let declared = glake_abi::NAMES.iter().copied().filter(|name| name.starts_with("glake_"));
    assert_eq!(defined, declared.collect());
}
