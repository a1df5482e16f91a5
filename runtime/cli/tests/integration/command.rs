//! The `glake` command from outside: exit codes, what goes where, and one line for every mistake.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const SMALL: &str = "a 0 1048576 0 0\na 1 20971520 0 5\nf 0 10\nf 1 20\n";

fn glake(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_glake"));
    command.args(arguments).env_clear().current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command
}

fn ran(arguments: &[&str]) -> Output {
    glake(arguments).output().unwrap()
}

/// A folder that goes when the test does.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("glake-command-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Scratch(folder)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Exit code and the one line on standard error; nothing on standard output.
fn refused(arguments: &[&str]) -> (i32, String) {
    let output = ran(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
    assert!(error.starts_with("glake: "), "{error}");
    (output.status.code().unwrap(), error)
}

#[test]
fn a_log_filter_that_matches_nothing_is_warned_of() {
    let output = ran(&["--log", "glake_tiers=debug,glake::host=warn", "topo", "--device", "sim"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{error}");
    assert!(
        error.contains("no event matches glake_tiers=debug; a part names one of glake::agent, "),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn help_and_version_are_results() {
    for arguments in [&["--help"][..], &["help", "replay"], &["replay", "--help"], &["bench", "alloc", "-h"]]
    {
        let output = ran(arguments);
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("Usage: glake"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{arguments:?}: wider than 100");
    }
    assert!(ran(&["--version"]).stdout.starts_with(b"glake "));
}

#[test]
fn a_mistake_in_the_arguments_is_one_line_and_exit_code_2() {
    let scratch = Scratch::new("mistakes");
    let trace = &*scratch.file("t.trace", SMALL);
    let decimal = &*scratch.file("d.toml", "[pool]\nlimit = \"20GB\"\n");
    let config = &*scratch.file("c.toml", "[pool]\nextend = \"16MiB\"\n");
    for (arguments, says) in [
        (&["frobnicate"][..], "unrecognized subcommand 'frobnicate'"),
        (&["replay"], "<TRACE>"),
        (&["replay", "--policy", "best", trace], "possible values: glake, gmlake, caching, expandable"),
        (&["replay", "--limit", "20GB", trace], "\"20GB\" is not an amount of memory: write 20GiB"),
        (&["replay", "--extent", "16M", trace], "\"16M\" is not an amount of memory: write 16MiB"),
        (
            &["replay", "--config", decimal, trace],
            "pool.limit = \"20GB\": allowed is a size: bytes, or a number and a unit such as \"512MiB\" or \"32GiB\"; write \"20GiB\"",
        ),
        (&["checkpoint", "abc"], "'abc' for '<PID>': it is a whole number, 0 or more"),
        (&["checkpoint", "-5"], "'-5' for '<PID>': "),
        (&["explain", "--last", "-1"], "'-1' for '--last <N>': it is a whole number, 0 or more"),
        (&["explain", "--last", "99999999999999999999"], "for '--last <N>': it is too large"),
        (&["bench", "copy", "--paths", "x"], "'x' for '--paths <N>': it is a whole number, 0 or more"),
        (&["plan", "--seeds", "1.5", "a", "b"], "'1.5' for '--seeds <N>': it is a whole number, 0 or more"),
        (&["plan", "--seeds", "0", "a", "b"], "'0' for '--seeds <N>': 0 is not in 1..=10000"),
        (
            &["replay", "--gpu-lag-ms", "-1", trace],
            "'-1' for '--gpu-lag-ms <N>': it is a whole number of milliseconds, 0 or more",
        ),
        (
            &["bench", "shrink", "--tier", "file", "--folder", "/no/such/folder"],
            "/no/such is not there: make it first",
        ),
        (&["topo", "--device", "sim:mine.toml"], "--device: mine.toml cannot be read: No such file"),
        (&["replay", "--borrow", "all", trace], "write off, completed or wait"),
        (&["replay", "--extent", "3MiB", trace], "--extent = 3145728: allowed is a multiple of 2MiB"),
        (&["replay", "--plot", "m.png", trace], "only SVG is drawn"),
        (&["replay", "--plot", "/no/such/m.svg", trace], "/no/such/m.svg: cannot be written"),
        (&["replay", "--find-limit", "--limit", "1GiB", trace], "cannot be used with"),
        (&["replay", "--device", "tpu", trace], "write auto, cuda, sim, sim:TOPOLOGY or sim:"),
        (&["replay", "--preset", "fast", trace], "write serverless"),
        (&["replay", "--config", "/no/such.toml", trace], "/no/such.toml: No such file"),
        (&["replay", "--config", config, trace], "c.toml:2: unknown key pool.extend; allowed: pool.extent, "),
        (&["replay", "--log", "a=b=c", trace], "levels by part"),
        (&["bench", "copy", "--sizes", "1MiB,0"], "take sizes from 1 byte up, and one is 0"),
    ] {
        let (code, error) = refused(arguments);
        assert!(code == 2 && error.contains(says), "{arguments:?}: {code} {error}");
    }
}

#[test]
fn a_trace_that_cannot_be_read_is_one_line_and_exit_code_2() {
    let scratch = Scratch::new("traces");
    let whole =
        fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/convmix.trace.gz")).unwrap();
    for (name, content, says) in [
        ("empty", &b""[..], "no events"),
        ("half.gz", &whole[..whole.len() / 2], "truncated"),
        ("unknown", b"a 0 512 0 0\nf 1 5\n", "unknown:2: "),
        ("double", b"a 0 512 0 0\nf 0 5\nf 0 6\n", "double:3: "),
        ("negative", b"a 0 -512 0 0\n", "negative:1: "),
        ("pickle", b"\x80\x04", "pickle"),
    ] {
        let file = scratch.file(name, content);
        let (code, error) = refused(&["replay", "--policy", "caching", &file]);
        assert!(code == 2 && error.contains(says), "{name}: {code} {error}");
    }
    assert_eq!(refused(&["replay", "--policy", "caching", "/no/such.trace"]).0, 2);
}

/// Exit code and error of a command that has a gibibyte of address space and 60 s.
fn refused_within_a_gibibyte(arguments: &[&str]) -> String {
    let limits = "ulimit -v 1048576 && exec timeout 60 \"$0\" \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", limits, env!("CARGO_BIN_EXE_glake")]).args(arguments).env_clear();
    let output = command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.lines().count() == 1, "{arguments:?}: {error}");
    error
}

/// A pickle of a snapshot with `segments` segments, all of which name one list of `blocks` live blocks, which name one block.
fn shared_blocks(segments: usize, blocks: usize) -> Vec<u8> {
    let text = |text: &str| [&[0x8c, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let block =
        [b"}".to_vec(), text("state"), text("active_allocated"), b"s".to_vec(), text("size")].concat();
    let mut pickle = [b"\x80\x04}(".to_vec(), text("blocks")].concat();
    pickle.extend([&b"]("[..], &block, b"M\x00\x02sq\x00"].concat());
    pickle.extend(b"h\x00".repeat(blocks - 1));
    pickle.extend(b"eq\x010");
    // The list lies in the memo; the dict begins anew.
    pickle.extend([b"0}(".to_vec(), text("segments"), b"](".to_vec()].concat());
    for segment in 0..u32::try_from(segments).unwrap() {
        let address = segment * 400_000 + 1;
        pickle.extend([b"}(".to_vec(), text("address"), b"J".to_vec()].concat());
        pickle.extend(address.to_le_bytes());
        pickle.extend([text("blocks"), b"h\x01u".to_vec()].concat());
    }
    pickle.extend([b"e".to_vec(), text("device_traces"), b"]]}(".to_vec(), text("action")].concat());
    pickle.extend(
        [text("alloc"), text("addr"), b"K\x01".to_vec(), text("size"), b"K\x01uaau.".to_vec()].concat(),
    );
    pickle
}

#[test]
fn hostile_files_and_flags_are_refused_within_a_gibibyte() {
    let scratch = Scratch::new("hostile");
    let blocks = scratch.file("blocks.pickle", shared_blocks(4_000, 4_000));
    let lists = scratch.file("lists.pickle", [&b"\x80\x04]"[..], &b"2".repeat(1 << 20)].concat());
    for (file, says) in [
        (&*blocks, "blocks.pickle: its segments have more than 69540 blocks"),
        (&lists, "lists.pickle: not a readable pickle (it ends in the middle"),
        ("/dev/zero", "/dev/zero: its content is larger than 512.00 MiB"),
    ] {
        let error = refused_within_a_gibibyte(&["replay", "--policy", "caching", file]);
        assert!(error.contains(says), "{file}: {error}");
    }
    let (workers, requests) = ("examples/workers.toml", "examples/requests.csv");
    let worker = |name: &str, key: &str| {
        let text =
            format!("[node]\nbudget = \"23GiB\"\n[[worker]]\nname = \"chat\"\nweights = \"1GiB\"\n{key}\n");
        scratch.file(name, text)
    };
    let (slow, huge) =
        (worker("slow.toml", "decode_ms = 1e300"), worker("huge.toml", "kv = \"16777215TiB\""));
    let patient = worker("patient.toml", "deadline_s = 1e300");
    let calibration = scratch.file("c.toml", "switch_ms = 1e300\n");
    let endless =
        scratch.file("endless.csv", "t_s,worker,context_tokens,generated_tokens\n0,chat,4294967295,1\n");
    for (arguments, says) in [
        (
            &[workers, requests, "--assign", "zipf:0", "--rate", "1e9", "--duration", "600"][..],
            "about 600000000000 requests",
        ),
        (&[workers, requests, "--rate", "1", "--duration", "1e300"], "it is a number above 0, at most 1e9"),
        (
            &[workers, requests, "--rate", "1", "--seeds", "10000", "--duration", "1e6"],
            "and a plan takes at most 8388608",
        ),
        (
            &[&slow, requests],
            "slow.toml: decode_ms of worker \"chat\" is 1e300: give milliseconds, from 0.001 to 60000",
        ),
        (&[&huge, requests], "huge.toml: worker \"chat\" fits nowhere"),
        (&[&patient, requests], "deadline_s of worker \"chat\" is 1e300: give seconds"),
        (
            &[workers, requests, "--calibration", &calibration],
            "c.toml: switch_ms is 1e300: give milliseconds",
        ),
        (
            &[workers, &endless],
            "endless.csv: line 2: context_tokens is \"4294967295\"; give a number of tokens, from 0 to 16777216",
        ),
        (&["/dev/zero", requests], "cannot read /dev/zero: it is larger than 1.00 MiB"),
        (&[workers, "/dev/zero"], "cannot read /dev/zero: its content is larger than 512.00 MiB"),
    ] {
        let error = refused_within_a_gibibyte(&[&["plan"], arguments].concat());
        assert!(error.contains(says), "{arguments:?}: {error}");
    }
}

#[test]
fn a_plan_that_cannot_be_is_one_line_and_exit_code_2() {
    let scratch = Scratch::new("plans");
    let (workers, requests) = ("examples/workers.toml", "examples/requests.csv");
    let head = "t_s,worker,context_tokens,generated_tokens\n";
    let trace = |name: &str, rows: &str| scratch.file(name, format!("{head}{rows}"));
    let node = |name: &str, text: &str| scratch.file(name, text);
    let (empty, unsorted) = (trace("empty.csv", ""), trace("unsorted.csv", "2,chat,1,1\n1,chat,1,1\n"));
    let (hole, stranger) = (trace("hole.csv", "1,chat,,1\n"), trace("stranger.csv", "1,poet,1,1\n"));
    let azure =
        scratch.file("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n");
    let large = "[node]\nbudget = \"23GiB\"\n[[worker]]\nname = \"a\"\nweights = \"30GiB\"\n";
    let (large, unknown) = (node("large.toml", large), node("unknown.toml", "[node]\nbudgets = 5\n"));
    let nothing = node("nothing.toml", "[node]\nbudget = \"100MiB\"\n");
    for (arguments, says) in [
        (
            &[workers, requests, "--policy", "best"][..],
            "there is no policy \"best\": choose from start-stop, drain-per-tensor",
        ),
        (&[workers, requests, "--assign", "uniform"], "it is zipf:S, S 0 or more"),
        (&[workers, requests, "--rate", "0"], "it is a number above 0"),
        (&[workers, requests, "--plot", "m.png"], "only SVG is drawn"),
        (&[workers, "/no/such.csv"], "cannot read /no/such.csv: No such file"),
        (&[workers, &empty], "empty.csv: it has no request"),
        (
            &[workers, &unsorted],
            "unsorted.csv: line 3 is 1s before the line above it: sort the trace by time",
        ),
        (&[workers, &hole], "hole.csv: line 2 has missing fields"),
        (&[workers, &stranger], "request 1 is for worker \"poet\", which is not in the workers' file"),
        (&[workers, &azure], "it names no worker: share its requests out with --assign zipf:1"),
        (&[workers, &azure, "--assign", "zipf:1", "--rate", "2"], "say how long with --duration"),
        (&[&large, requests], "large.toml: worker \"a\" fits nowhere: it needs 30.00 GiB of GPU 0"),
        (&[&unknown, requests], "unknown field `budgets`"),
        (&[&nothing, requests], "budget of [node] is 100.00 MiB: give more than the reserve"),
    ] {
        let (code, error) = refused(&[&["plan"], arguments].concat());
        assert!(code == 2 && error.contains(says), "{arguments:?}: {code} {error}");
    }
}

#[test]
fn a_plan_that_draws_nothing_runs_once() {
    let plan = ["plan", "examples/workers.toml", "examples/requests.csv", "--json", "--policy", "glake"];
    let output = ran(&[&plan[..], &["--seeds", "3"]].concat());
    assert!(output.status.success() && output.stdout == ran(&plan).stdout);
    let error = String::from_utf8(output.stderr).unwrap();
    let says = "glake: one run instead of 3: without --rate and --assign no seed changes the requests\n";
    assert_eq!(error, says);
    let output = ran(&[&plan[..], &["--seeds", "2", "--assign", "zipf:0"]].concat());
    assert!(output.status.success() && output.stderr.is_empty());
}

#[test]
fn a_plan_is_a_table_or_objects_and_a_picture() {
    let scratch = Scratch::new("plan");
    let plot = scratch.0.join("plan.svg");
    let plan = ["plan", "examples/workers.toml", "examples/requests.csv"];
    let output = ran(&[&plan[..], &["--plot", plot.to_str().unwrap()]].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    assert!(table.contains("glake-no-preempt") && table.contains("start-stop"), "{table}");
    assert!(fs::read_to_string(&plot).unwrap().trim_end().ends_with("</svg>"));
    let output = ran(&[&plan[..], &["--json", "--policy", "drain-per-tensor,glake", "--slo", "2"]].concat());
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).unwrap();
    let objects: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let fields = "policy requests ttft_p50_s ttft_p99_s ttft_p99_low_s ttft_p99_high_s e2e_p50_s e2e_p99_s \
                  max_gap_p99_s hit_rate gpu_seconds_per_request refilled_bytes bytes_per_request link_duty denied density";
    for field in fields.split_whitespace() {
        assert!(objects.iter().all(|object| !object[field].is_null()), "{field}: {text}");
    }
    assert_eq!((objects.len(), &objects[1]["policy"]), (2, &"glake".into()));
    assert_eq!(objects[0].as_object().unwrap().len(), 16);
}

#[test]
fn the_environment_configures_and_is_checked() {
    let scratch = Scratch::new("environment");
    let trace = scratch.file("t.trace", SMALL);
    let run = |variables: &[(&str, &str)]| {
        let mut command = glake(&["replay", "--policy", "caching", &trace]);
        command.envs(variables.iter().copied()).output().unwrap()
    };
    assert!(run(&[("reuseLimit", "2")]).status.success());
    let output = run(&[("fragLimit", "1MiB"), ("fragment_limit", "2MiB")]);
    assert_eq!(output.status.code(), Some(2));
    let config = scratch.file("c.toml", "pool.limit = \"8MiB\"\n");
    let output = run(&[("GLAKE_CONFIG", &config)]);
    assert_eq!(output.status.code(), Some(1), "the file's limit holds");
}

#[test]
fn out_of_memory_is_exit_code_1_after_the_figures() {
    let scratch = Scratch::new("oom");
    let trace = scratch.file("t.trace", SMALL);
    let output = ran(&["replay", "--policy", "caching", "--limit", "16MiB", &trace]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("caching"));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.starts_with("glake: t under caching ran out of memory 1 times, first at line 2: "),
        "{error}"
    );
}

#[test]
fn json_is_one_object_a_line_and_nothing_else() {
    let output =
        ran(&["replay", "--json", "--policy", "caching,expandable", "tests/traces/convmix.trace.gz"]);
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).unwrap();
    let objects: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(objects.len(), 2);
    assert_eq!(objects[0]["policy"], "caching");
    for field in "trace policy device gpu_lag_ms borrow events allocations requested_peak active_peak \
                  reserved_peak utilization fit_limit ooms stitches extent_maps stream_waits driver_calls \
                  driver_us driver_us_late ns_per_op"
        .split_whitespace()
    {
        assert!(objects.iter().all(|object| object.get(field).is_some()), "{field}");
    }
}

#[test]
fn a_plot_appears_whole_and_alone() {
    let scratch = Scratch::new("plot");
    let plot = scratch.0.join("m.svg");
    let output = ran(&[
        "replay",
        "--policy",
        "caching,expandable",
        "--plot",
        plot.to_str().unwrap(),
        "tests/traces/convmix.trace.gz",
    ]);
    assert!(output.status.success());
    assert!(fs::read_to_string(&plot).unwrap().trim_end().ends_with("</svg>"));
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let traces = ["tests/traces/convmix.trace.gz"; 40];
    let arguments = [&["replay", "--json", "--policy", "caching"][..], &traces].concat();
    let mut child = glake(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(child.wait().unwrap().success() && error.is_empty(), "{error}");
}

#[test]
fn topologies_are_drawn_and_checked() {
    let output = ran(&["topo", "--device", "sim:a100x8"]);
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("a100x8 (simulated)") && text.contains("NVLink"), "{text}");

    let output = ran(&["topo", "--json", "--device", "sim:h20x8"]);
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["devices"].as_array().map(Vec::len), Some(8));

    let scratch = Scratch::new("topologies");
    let half = format!("sim:{}", scratch.file("half.toml", "name = \"half\"\n"));
    for (device, says) in [
        ("sim:h300", "\"h300\" does not exist"),
        (&*half, "half.toml:1: "),
        ("sim:./none.toml", "No such file"),
    ] {
        let (code, error) = refused(&["topo", "--device", device]);
        assert!(code == 2 && error.contains(says), "{device}: {code} {error}");
    }
}

#[test]
fn links_are_measured_once_they_are_asked_to_be() {
    let scratch = Scratch::new("calibrations");
    let cache = scratch.0.to_str().unwrap();
    let device = crate::two_gpus(&scratch.0);
    let topo = |flags: &[&str]| {
        let arguments = [&["topo", "--json", "--device", &device], flags].concat();
        let output = glake(&arguments).env("XDG_CACHE_HOME", cache).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (object, String::from_utf8(output.stderr).unwrap())
    };
    assert!(topo(&[]).0["calibrated"].is_null());
    let (measured, told) = topo(&["--calibrate"]);
    assert!(told.contains(" trials in ") && told.contains(cache), "{told}");
    let gpu = &measured["calibrated"][0];
    assert!(gpu["together_gbps"].as_f64().unwrap() > 1.8 * gpu["paths"][0]["gbps"].as_f64().unwrap());
    let (kept, told) = topo(&[]);
    assert_eq!((&kept["calibrated"], told.as_str()), (&measured["calibrated"], ""));
}

#[test]
fn auto_says_what_it_took_and_cuda_is_an_error_without_a_driver() {
    let output = ran(&["topo", "--json"]);
    assert!(output.status.success());
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    if object["simulated"] == true {
        let notice = String::from_utf8(output.stderr).unwrap();
        assert!(notice.starts_with("glake: device sim:h200x4: no CUDA driver answers"), "{notice}");
        assert!(notice.trim_end().chars().count() <= 80, "{notice}");
        let (code, error) = refused(&["topo", "--device", "cuda"]);
        assert!(code == 1 && error.contains("no CUDA driver"), "{code} {error}");
    }
}

#[test]
fn the_doctor_looks_at_everything_and_says_what_to_do() {
    let output = ran(&["doctor", "--json", "--device", "sim:h20x8"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let checks: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = checks.iter().map(|check| check["check"].as_str().unwrap()).collect();
    assert_eq!(
        names.join(", "),
        "driver, gpu, mappings, handles, peers, links, huge pages, memlock, host memory, library, preload, torch, \
         variables, settings"
    );
    for check in &checks {
        assert!(check["state"] == "ok" || check["state"] == "note", "{check}");
        for text in ["found", "advice"] {
            assert!(
                check[text].as_str().is_some_and(|text| !text.is_empty() && !text.contains('\n')),
                "{check}"
            );
        }
    }
    assert_eq!(checks[1]["found"], "8 of Simulated H20, 95.58 GiB");
    assert_eq!(checks[11]["found"], "no python3 in PATH");

    let mut command = glake(&["doctor", "--device", "sim"]);
    let output = command.env("GLAKE_CONFG", "mine.toml").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("GLAKE_CONFG is none of ours"), "{text}");
}

#[test]
fn a_machine_without_a_gpu_is_a_problem() {
    if glake(&["topo", "--device", "cuda"]).output().unwrap().status.success() {
        return;
    }
    for device in ["auto", "cuda"] {
        let output = ran(&["doctor", "--device", device]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.code() == Some(1) && output.stderr.is_empty(), "{text}");
        assert!(text.starts_with("problem  gpu          no GPU found: no CUDA driver"), "{text}");
        assert!(text.contains("docker run --gpus all") && text.contains("host memory"), "{text}");
    }
    let (code, error) = refused(&["doctor", "--device", "sim:h300"]);
    assert!(code == 2 && error.contains("does not exist"), "{error}");
}

/// Bytes that the machine cannot hold are refused before any is touched: simulated GPUs keep theirs in its memory.
#[test]
fn simulated_gpus_take_no_more_memory_than_the_machine_has() {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let all = format!("{}KiB", line.trim().strip_suffix(" kB").unwrap());
    let (shrink, copy) = (["shrink", "--bytes", &all], ["copy", "--memory", "pageable", "--sizes", &all]);
    for arguments in [&shrink[..], &copy] {
        let output = ran(&[&["bench"], arguments, &["--device", "sim", "--paths", "1"]].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains("were asked for")
                && error.contains("are available")
                && error.contains("ask for fewer"),
            "{error}"
        );
    }
}

#[test]
fn a_replay_ends_at_its_time_limit() {
    let (code, error) =
        refused(&["replay", "--policy", "caching", "--time-limit", "0", "tests/traces/convmix.trace.gz"]);
    assert!(code == 1 && error.contains("events took 0 s") && error.contains("--time-limit"), "{error}");
}
