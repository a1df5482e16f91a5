//! The `glake` command where it runs the product itself, on the simulator.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn ran(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glake"));
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    command.args(arguments).args(["--device", "sim"]).env_clear().current_dir(root).output().unwrap()
}

fn objects(arguments: &[&str]) -> Vec<Value> {
    let output = ran(&[arguments, &["--json"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && error.is_empty(), "{arguments:?}: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_demo_tells_every_stage_and_all_is_well() {
    let stages = objects(&["demo"]);
    let names: Vec<&str> = stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["stitch", "streams", "compare", "copy", "shrink"]);
    assert!(stages.iter().all(|stage| stage["ok"] == true), "{stages:?}");
    let stitch = &stages[0]["figures"];
    assert!(stitch["wanted_bytes"].as_u64() > stitch["longest_free_bytes"].as_u64(), "{stitch}");
    assert_eq!(stitch["matched_at_home_bytes"], stitch["written_bytes"]);
    let copy = &stages[3]["figures"];
    assert_eq!((&copy["links"], &copy["virtual_time"]), (&4.into(), &true.into()), "{copy}");
    assert_eq!([&copy["matched_on_gpu_bytes"], &copy["matched_on_host_bytes"]], [&copy["bytes"]; 2]);
    assert!(copy["gbps"].as_f64() > copy["link_gbps"].as_f64().map(|one| 2.5 * one), "{copy}");
    let shrink = &stages[4]["figures"];
    assert_eq!((&shrink["left_bytes"], &shrink["refused_before"]), (&0.into(), &true.into()), "{shrink}");
    assert_eq!(
        (&shrink["copied_bytes"], &shrink["sealed_again_copied_bytes"]),
        (&shrink["live_bytes"], &0.into())
    );
    assert!(shrink["lent_bytes"].as_u64() > shrink["live_bytes"].as_u64(), "{shrink}");
}

/// What the demo says in a terminal.
fn fits_a_terminal(output: &Output) {
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() <= 40 && lines.iter().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.contains("lent to the stitched block") && !text.contains('\u{1b}'), "{text}");
    assert_eq!(lines.iter().filter(|line| line.starts_with("✓ ")).count(), 5, "{text}");
    let [memory, copies]: [&str; 2] = lines[lines.len() - 2..].try_into().unwrap();
    assert!(memory.starts_with("memory ") && copies.starts_with("copies "), "{text}");
}

#[test]
fn the_hot_path_is_measured_on_the_library_or_not_at_all() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let mut command = Command::new(env!("CARGO_BIN_EXE_glake"));
    command.args(["bench", "alloc", "--device", "sim"]).current_dir(root);
    let output = command.env_clear().env("GLAKE_LIBRARY", "/no/such/libgmlake.so").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("/no/such/libgmlake.so is not there: build it with make build"), "{error}");
}

#[test]
fn sizes_for_the_hot_path_must_be_readable() {
    let output = ran(&["bench", "alloc", "/no/such.trace"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
}

#[test]
fn the_product_replays_beside_the_models() {
    let reports = objects(&["replay", "tests/traces/convmix.trace.gz"]);
    let policies: Vec<&str> = reports.iter().map(|report| report["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["glake", "gmlake", "caching", "expandable"]);
    let own = &reports[0];
    assert_eq!(
        (&own["device"], &own["gpu_lag_ms"], &own["borrow"]),
        (&"sim:h200x4".into(), &100.into(), &"completed".into())
    );
    let verified = objects(&["replay", "--policy", "glake", "--verify", "tests/traces/convmix.trace.gz"]);
    assert_eq!(verified[0]["reserved_peak"], own["reserved_peak"]);
}

#[test]
fn a_request_larger_than_the_device_is_out_of_memory() {
    let path = std::env::temp_dir().join(format!("glake-product-{}.trace", std::process::id()));
    std::fs::write(&path, "a 0 1099511627776 0 0\nf 0 5\n").unwrap();
    let output = ran(&["replay", "--policy", "glake", path.to_str().unwrap()]);
    std::fs::remove_file(path).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("under glake ran out of memory 1 times, first at line 1"), "{error}");
}

#[test]
fn copies_on_a_model_are_told_in_its_virtual_time_up_to_gibibytes() {
    let copies = |arguments: &[&str]| -> Vec<Value> {
        let output = ran(&[&["bench", "copy", "--json"], arguments].concat());
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let reports = copies(&["--sizes", "1MiB,4GiB", "--memory", "pool,foreign,mempool"]);
    assert_eq!(reports.len(), 12);
    for report in &reports {
        let large = report["bytes"] == 4_u64 << 30;
        assert!(report["virtual_time"] == true && report["verified"] == !large, "{report}");
        assert_eq!(report["paths"], if large { 4 } else { 1 }, "{report}");
        let gbps = |name: &str| report[name].as_f64().unwrap();
        assert!(gbps("limit_gbps") > 0.95 * gbps("engine_gbps"), "{report}");
        // One link of the model gives 55 GB/s, all of them 213 to a GPU and 160 from it.
        assert!(!large || (gbps("native_gbps") < 56.0 && gbps("engine_gbps") > 120.0), "{report}");
    }
    let again = copies(&["--sizes", "4GiB", "--direction", "h2d"]);
    assert_eq!(again[0]["native_gbps"], reports[1]["native_gbps"], "virtual time is no matter of chance");
    let others =
        copies(&["--sizes", "8MiB", "--memory", "scattered,broadcast", "--direction", "h2d", "--paths", "3"]);
    assert!(others.len() == 2 && others.iter().all(|report| report["verified"] == true), "{others:?}");
}

#[test]
fn virtual_time_is_said_above_the_table() {
    let output = ran(&["bench", "copy", "--sizes", "16MiB"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("sim:h200x4 in virtual time: "), "{text}");
    assert!(!text.contains("cores") && text.lines().count() == 5, "{text}");
}

#[test]
fn a_copy_that_cannot_be_told_of_is_refused() {
    for (arguments, code, says) in [
        (
            &["--paths", "9"][..],
            2,
            "--paths 9: 4 GPUs are here, so ask for 1 to 4, or leave --paths out for all of them",
        ),
        (&["--target", "4"][..], 2, "GPU 4 does not exist: 4 are here, counted from 0"),
        (
            &["--block", "1"][..],
            2,
            "--block 1 is the size of scattered blocks, and none are measured: add --memory scattered",
        ),
        (
            &["--block", "1", "--memory", "scattered"][..],
            2,
            "scattered blocks have 512 B or more; write --block 512",
        ),
        (
            &["--block", "512", "--memory", "scattered", "--sizes", "4GiB"][..],
            2,
            "write --block 4096 or smaller --sizes",
        ),
        (&["--sizes", "1TiB"][..], 1, "a GPU has no room for it: choose a smaller --sizes"),
        (
            &["--sizes", "1024TiB", "--memory", "foreign"][..],
            1,
            "a GPU has no room for it: choose a smaller --sizes",
        ),
        (&["--sizes", "16000000TiB"][..], 1, "a GPU has no room for it: choose a smaller --sizes"),
    ] {
        let output = ran(&[&["bench", "copy"], arguments].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && error.contains(says), "{arguments:?}: {error}");
        assert!(!error.to_lowercase().contains("torch"), "{error}");
    }
}

/// What a measurement tells; it says on standard error that its GPUs are simulated.
fn shrinks(arguments: &[&str]) -> Vec<Value> {
    let output = ran(&[&["bench", "shrink", "--json", "--runs", "2"], arguments].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && error.contains("simulated"), "{arguments:?}: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_shrink_and_a_refill_are_measured_first_and_warm() {
    let reports = shrinks(&["--bytes", "24MiB", "--tensors", "7"]);
    let told: Vec<_> =
        reports.iter().map(|report| (report["phase"].as_str().unwrap(), &report["warm"])).collect();
    let (cold, warm) = (Value::from(false), Value::from(true));
    assert_eq!(told, [("shrink", &cold), ("refill", &cold), ("shrink", &warm), ("refill", &warm)]);
    for report in &reports {
        let fixed = ["device", "tier", "bytes", "tensors", "copied_bytes", "leaked_bytes", "verified"];
        let fixed = fixed.map(|name| report[name].clone());
        let bytes = Value::from(24 << 20);
        let expected =
            ["sim:h200x4".into(), "host".into(), bytes.clone(), 7.into(), bytes, 0.into(), true.into()];
        assert_eq!(fixed, expected, "{report}");
        // What copies over other links use is made beside the first shrink.
        let is_first = report["phase"] == "shrink" && report["warm"] == false;
        assert!(is_first || report["paths"] == 4, "{report}");
        assert!(report["gbps"].as_f64() > Some(0.0) && report["link_gbps"].as_f64() > Some(0.0), "{report}");
    }
}

#[test]
fn what_is_sealed_leaves_again_without_a_copy() {
    let reports = shrinks(&["--bytes", "9MiB", "--tensors", "3", "--sealed", "--prepare", "--paths", "1"]);
    let copied: Vec<_> = reports.iter().map(|report| report["copied_bytes"].as_u64().unwrap()).collect();
    assert_eq!(copied, [9 << 20, 9 << 20, 0, 9 << 20]);
    assert!(reports.iter().all(|report| report["paths"] == 1 && report["prepared"] == true), "{reports:?}");
}

#[test]
fn every_tier_has_its_own_measurements() {
    let folder = std::env::temp_dir().join(format!("glake-product-{}-files", std::process::id()));
    let path = folder.to_str().unwrap();
    let some = ["--bytes", "10MiB", "--tensors", "5", "--verify", "--tier", "peer,file", "--folder", path];
    let reports = shrinks(&some);
    let tiers: Vec<_> = reports.iter().map(|report| report["tier"].as_str().unwrap()).collect();
    assert_eq!(tiers, [["peer"; 4], ["file"; 4]].concat());
    for report in &reports {
        assert!(report["checked"] == true && report["verified"] == true, "{report}");
        assert!(report["copied_bytes"] == 10 << 20 && report["leaked_bytes"] == 0, "{report}");
    }
    // The folder is whose it was named by; the files are gone.
    std::fs::remove_dir(folder).unwrap();
}

#[test]
fn a_shrink_that_cannot_be_measured_is_refused() {
    for (arguments, code, says) in [
        (&["--target", "9"][..], 2, "GPU 9 does not exist: 4 are here, counted from 0"),
        (&["--paths", "9"][..], 2, "--paths 9: 4 GPUs are here, so ask for 1 to 4"),
        (&["--bytes", "63"][..], 2, "--bytes must be 1 byte a tensor or more, and 64 were asked for"),
        (&["--tier", "peer", "--peer", "0"][..], 2, "GPU 0 has no peer to lend it memory"),
        (&["--tier", "peer", "--peer", "4"][..], 2, "GPU 4 does not exist: 4 are here, counted from 0"),
        (&["--tier", "file", "--folder", "/proc/none"][..], 1, "/proc/none: open:"),
        (&["--tensors", "0"][..], 2, "invalid value '0' for '--tensors <N>'"),
        (&["--tier", "tape"][..], 2, "invalid value 'tape' for '--tier <TIER>'"),
        (&["--bytes", "100TiB", "--tensors", "1"][..], 1, "204800.00 GiB were asked for with their copies"),
    ] {
        let output = ran(&[&["bench", "shrink"], arguments].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && error.contains(says), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}

/// The text files of a folder, and of those in it.
fn texts_of(folder: &Path, endings: &[&str], found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "tests" && name != "target") {
            texts_of(&path, endings, found);
        } else if endings.iter().any(|ending| path.extension().is_some_and(|have| have == *ending)) {
            let text = fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
}

fn texts(endings: &[&str]) -> Vec<(PathBuf, String)> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut found = Vec::new();
    for folder in ["configs", "docs", "ffi", "runtime", "tiers", "transfer"] {
        texts_of(&root.join(folder), endings, &mut found);
    }
    found
}

/// A filter that names a part of GLake, wherever one is given as an example, shows that part's events.
#[test]
fn every_log_filter_that_is_documented_shows_events_and_the_demo_fits_a_terminal() {
    let help = String::from_utf8(ran(&["--help"]).stdout).unwrap();
    let mut sources = texts(&["md", "toml", "rs", "py", "h"]);
    sources.push(("--help".into(), help));
    let levels = ["trace", "debug", "info"];
    let mut examples: BTreeMap<&str, &Path> = BTreeMap::new();
    for (path, text) in &sources {
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_:=,".contains(letter);
        for token in text.split(|letter| !is_part(letter)) {
            let filter = token.trim_start_matches("GLAKE_LOG=").trim_end_matches([',', ':']);
            let named = filter.split(',').filter_map(|part| part.split_once('='));
            if named.clone().any(|(target, level)| target.starts_with("glake") && levels.contains(&level)) {
                examples.insert(filter, path);
            }
        }
    }
    assert!(examples.len() >= 2 && examples.values().any(|path| path.ends_with("--help")), "{examples:?}");
    // One run for all that name different parts.
    let mut runs: Vec<BTreeMap<&str, (&str, &str, &Path)>> = Vec::new();
    for (filter, path) in examples {
        for (target, level) in filter.split(',').filter_map(|part| part.split_once('=')) {
            let is_free = |run: &&mut BTreeMap<&str, (&str, _, _)>| {
                run.get(target).is_none_or(|(known, ..)| *known == level)
            };
            match runs.iter_mut().find(is_free) {
                Some(run) => _ = run.insert(target, (level, filter, path)),
                None => runs.push(BTreeMap::from([(target, (level, filter, path))])),
            }
        }
    }
    for run in runs {
        let parts: Vec<String> =
            run.iter().map(|(target, (level, ..))| format!("{target}={level}")).collect();
        let output = ran(&["--log", &parts.join(","), "demo"]);
        fits_a_terminal(&output);
        let log = String::from_utf8(output.stderr).unwrap();
        for (target, (_, filter, path)) in run {
            assert!(log.contains(&format!(" {target}: ")), "{filter} of {}: {log}", path.display());
        }
    }
}

/// Every event names the part that it is of, and docs/TUNING.md and the warning of filters list all parts.
#[test]
fn every_event_is_of_a_part_that_is_documented() {
    let mut parts = BTreeSet::new();
    for (path, text) in texts(&["rs"]) {
        for macro_name in ["error!(", "warn!(", "info!(", "debug!(", "trace!("] {
            for (at, _) in text.match_indices(macro_name) {
                let event = text[at + macro_name.len()..].trim_start();
                let part = event.strip_prefix("target: \"glake::").and_then(|rest| rest.split('"').next());
                let start: String = event.chars().take(60).collect();
                let part = part.unwrap_or_else(|| panic!("{}: {macro_name}{start}", path.display()));
                parts.insert(part.to_owned());
            }
        }
    }
    let tuning = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/TUNING.md")).unwrap();
    let rows = tuning.lines().filter_map(|line| line.strip_prefix("| `glake::")?.split('`').next());
    assert_eq!(parts, rows.map(str::to_owned).collect());
    let known: Vec<String> = parts.iter().map(|part| format!("glake::{part}")).collect();
    assert_eq!(known, glake_runtime::log::TARGETS);
}
