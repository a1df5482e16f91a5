//! The library under C programs, with stand-ins for CUDA's libraries and, except in one test, for `libgmlake.so`. `program.h` and the files
//! that include it check what programs see; this file builds and runs them.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns the preload library built for these tests.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libglake_preload.so")
}

/// Returns the real `libgmlake.so`, built for these tests too.
fn gmlake() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libgmlake.so")
}

/// Temporary folder with the stand-ins and the program.
struct Fixture(PathBuf);

impl Fixture {
    /// Creates the folder, named after the test, with the program of this source.
    fn new(name: &str, program: &str) -> Self {
        let folder = format!("preload-{name}-{}", std::process::id());
        let fixture = Fixture(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(folder));
        fs::create_dir_all(&fixture.0).unwrap();
        // As NVIDIA's: its functions have the library's name for a version.
        let versions = fixture.path("cudart.version");
        fs::write(&versions, "libcudart.so.13 { global: *; };\n").unwrap();
        fixture.shared("cuda.c", "libcuda.so.1", &[]);
        fixture.shared(
            "cudart.c",
            "libcudart.so.13",
            &["-l:libcuda.so.1", &format!("-Wl,--version-script={}", versions.display())],
        );
        fixture.shared("gmlake.c", "libgmlake.so", &["-DCOPIES"]);
        fixture.program(program);
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Builds the program, linked with the libraries that it calls; others are loaded late.
    fn program(&self, source: &str) {
        let needed = ["-Wl,--as-needed", "-l:libcudart.so.13", "-l:libcuda.so.1", "-lpthread"];
        self.compile(source, "program", &needed);
    }

    /// Builds a library whose soname is its file name.
    fn shared(&self, source: &str, to: &str, more: &[&str]) {
        let name = format!("-Wl,-soname,{}", Path::new(to).file_name().unwrap().display());
        self.compile(source, to, &[&["-shared", "-Wl,-Bsymbolic", &name], more].concat());
    }

    fn compile(&self, source: &str, to: &str, more: &[&str]) {
        let to = self.path(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
        let folder = self.0.display();
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let done = Command::new(&compiler)
            // The program's tables hold functions of several signatures.
            .args(["-std=gnu11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-strict-prototypes"])
            .arg(&source)
            .arg("-o")
            .arg(&to)
            .args([format!("-L{folder}"), format!("-Wl,-rpath,{folder}")])
            .args(more)
            .arg("-ldl")
            .output()
            .unwrap();
        assert!(done.status.success(), "{}: {}", source.display(), String::from_utf8_lossy(&done.stderr));
    }

    /// Returns a command of the program under the library, switched on, with the stand-in for `libgmlake.so`.
    fn under(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        for name in ["GLAKE_CONFIG", "GLAKE_DEVICE", "LD_LIBRARY_PATH"] {
            command.env_remove(name);
        }
        command.env("LD_PRELOAD", library()).env("GLAKE_MULTI_PATH", "1");
        command.env("GLAKE_LIBRARY", self.path("libgmlake.so"));
        command
    }

    fn scenario(&self, name: &str) -> Command {
        let mut command = self.under(self.path("program"));
        command.arg(name);
        command
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns its output on both streams.
fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// Checks that it succeeded with this output.
fn ends(mut command: Command, out: &str, error: &str) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {} {:?}", output.status, said(&output));
    assert_eq!(said(&output), (out.to_owned(), error.to_owned()), "{command:?}");
}

#[test]
fn what_is_large_is_taken_as_it_was_asked_for() {
    ends(Fixture::new("taken", "copies.c").scenario("taken"), "", "");
}

#[test]
fn what_is_small_is_never_asked_about() {
    ends(Fixture::new("small", "copies.c").scenario("small"), "", "");
}

#[test]
fn it_is_off_where_nobody_switches_it_on() {
    let fixture = Fixture::new("off", "entries.c");
    for value in [None, Some(""), Some("0")] {
        let mut command = fixture.scenario("off");
        match value {
            Some(value) => command.env("GLAKE_MULTI_PATH", value),
            None => command.env_remove("GLAKE_MULTI_PATH"),
        };
        ends(command, "", "");
    }
    let mut command = fixture.scenario("off");
    command.env("GLAKE_MULTI_PATH", "1").env("GLAKE_DISABLE", "1");
    ends(command, "", "");
    let mut command = fixture.scenario("off");
    command.env("GLAKE_MULTI_PATH", "yes");
    let says =
        "glake: this program's copies take one path each: GLAKE_MULTI_PATH = \"yes\": allowed is 0 or 1\n";
    ends(command, "", says);
}

#[test]
fn what_it_does_not_know_passes() {
    let fixture = Fixture::new("unknown", "copies.c");
    ends(fixture.scenario("of-another-kind"), "", "");
    ends(fixture.scenario("without-a-context"), "", "");
    ends(fixture.scenario("with-an-old-runtime"), "", "");
}

#[test]
fn what_is_not_taken_is_made_natively() {
    ends(Fixture::new("not-taken", "copies.c").scenario("not-taken"), "", "");
}

#[test]
fn a_failure_is_told_as_the_runtime_would() {
    let says = "glake: a copy of 3145728 bytes failed: the stand-in was told to fail\n";
    ends(Fixture::new("failed", "copies.c").scenario("failed"), "", says);
}

#[test]
fn a_library_that_does_not_serve_is_asked_once() {
    let fixture = Fixture::new("unavailable", "copies.c");
    let says = "glake: this program's copies take one path each: the stand-in was told to fail\n";
    ends(fixture.scenario("unavailable"), "", says);
    ends(fixture.scenario("ended"), "ended\n", "");
}

#[test]
fn functions_that_a_program_asks_for_are_ours() {
    ends(Fixture::new("entries", "entries.c").scenario("entries"), "", "");
}

#[test]
fn threads_and_forks() {
    let fixture = Fixture::new("threads", "processes.c");
    ends(fixture.scenario("threads"), "", "");
    ends(fixture.scenario("forked"), "", "");
    fixture.shared("gmlake.c", "slow/libgmlake.so", &["-DCOPIES", "-DSLOW"]);
    let mut meanwhile = fixture.scenario("forked-meanwhile");
    meanwhile.env("GLAKE_LIBRARY", fixture.path("slow/libgmlake.so"));
    ends(meanwhile, "", "");
}

#[test]
fn a_small_copy_costs_less_than_half_a_microsecond_more() {
    let output = Fixture::new("fast", "processes.c").scenario("fast").output().unwrap();
    assert!(output.status.success(), "{:?}", said(&output));
    println!("{}", said(&output).0);
}

#[test]
fn the_library_is_found() {
    let fixture = Fixture::new("found", "processes.c");
    let mut loaded = fixture.scenario("loaded-before");
    loaded.env("STAND_IN_LIBRARY", fixture.path("libgmlake.so")).env("GLAKE_LIBRARY", "/no/such.so");
    ends(loaded, "", "");

    fixture.program("copies.c");
    let ours = fixture.path("libglake_preload.so");
    fs::copy(library(), &ours).unwrap();
    let mut beside = fixture.scenario("taken");
    beside.env_remove("GLAKE_LIBRARY").env("LD_PRELOAD", &ours);
    ends(beside, "", "");

    fs::create_dir(fixture.path("elsewhere")).unwrap();
    fs::rename(&ours, fixture.path("elsewhere/libglake_preload.so")).unwrap();
    let mut by_name = fixture.scenario("taken");
    by_name.env("GLAKE_LIBRARY", "").env("LD_PRELOAD", fixture.path("elsewhere/libglake_preload.so"));
    by_name.env("LD_LIBRARY_PATH", &fixture.0);
    ends(by_name, "", "");
}

#[test]
fn without_the_library_a_program_goes_on() {
    let fixture = Fixture::new("without", "copies.c");
    fixture.shared("gmlake.c", "before/libgmlake.so", &[]);
    fixture.shared("gmlake.c", "other/libgmlake.so", &["-DCOPIES", "-DABI=7"]);
    fixture.shared("gmlake.c", "later/libgmlake.so", &["-DCOPIES", "-DRELEASE=\"9.8.7\""]);
    let ours = glake_abi::Version::OURS.to_string();
    let other =
        |found: &str| format!("{found}, libglake_preload.so is of {ours}: take both from one release");
    let interface =
        other(&format!("/other/libgmlake.so is of release {} with interface 7", env!("CARGO_PKG_VERSION")));
    let release =
        other(&format!("/later/libgmlake.so is of release 9.8.7 with interface {}", glake_abi::ABI));
    for (file, says) in [
        (PathBuf::from("/no/such.so"), "/no/such.so: cannot open shared object file: No such file"),
        (
            fixture.path("before/libgmlake.so"),
            "undefined symbol: glake_copy_try; put libgmlake.so of the same build",
        ),
        (fixture.path("other/libgmlake.so"), &interface),
        (fixture.path("later/libgmlake.so"), &release),
    ] {
        let output = fixture.scenario("without").env("GLAKE_LIBRARY", file).output().unwrap();
        let (out, error) = said(&output);
        assert!(output.status.success() && out.is_empty(), "{error}");
        assert!(error.starts_with("glake: this program's copies take one path each: "), "{error}");
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn libraries_may_come_late_and_under_other_names() {
    let fixture = Fixture::new("late", "late.c");
    fixture.shared("extension.c", "extension.so", &["-l:libcudart.so.13"]);
    // As wheels have it, which give what they bring a name of their own.
    let renamed = "libcudart-d0da41ae.so.12";
    fixture.shared("cudart.c", renamed, &["-l:libcuda.so.1"]);
    fixture.shared("extension.c", "renamed.so", &[&format!("-l:{renamed}")]);
    for extension in ["extension.so", "renamed.so"] {
        let mut command = fixture.under(fixture.path("program"));
        command.arg(fixture.path(extension));
        // Of the sizes from 1 to 4^11 bytes two are large.
        ends(command, "asked 2\n", "");
    }
}

#[test]
fn the_real_engine_copies_over_its_relays() {
    let fixture = Fixture::new("engine", "engine.c");
    let mut command = fixture.scenario("over-relays");
    command.env("GLAKE_LIBRARY", gmlake()).env("GLAKE_DEVICE", "sim:h200x4");
    // Nobody's calibration, and nobody's ranks.
    command.env("XDG_CACHE_HOME", fixture.path("cache"));
    for name in ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"]
    {
        command.env_remove(name);
    }
    ends(command, "", "");
}

#[test]
fn a_program_without_cuda_sees_nothing() {
    let fixture = Fixture::new("none", "copies.c");
    ends(fixture.under("/bin/true"), "", "");
    let mut shell = fixture.under("/bin/sh");
    shell.args(["-c", "echo $(echo one | cat) two; exit 0"]);
    ends(shell, "one two\n", "");
    assert_eq!(fixture.under("/bin/false").output().unwrap().status.code(), Some(1));
}
