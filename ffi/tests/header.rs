//! The checked-in header is what cbindgen writes. `GLAKE_WRITE_HEADER=1 cargo test -p glake-ffi --test header` writes it.

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
