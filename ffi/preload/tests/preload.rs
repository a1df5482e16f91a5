//! The library under programs of C, with stand-ins for CUDA's libraries and, but in one test, for `libgmlake.so`. What the
//! programs must see is in `program.h` and the files that include it; here they are built and run.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The library, which is built for these tests and lies beside them.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libglake_preload.so")
}

/// The real `libgmlake.so`, which is built for these tests too.
fn gmlake() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libgmlake.so")
}

/// A folder with the stand-ins and the program, which goes when the test does.
struct Bed(PathBuf);

impl Bed {
    /// Named as the test; with the program of this source.
    fn new(name: &str, program: &str) -> Self {
        let folder = format!("preload-{name}-{}", std::process::id());
        let bed = Bed(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(folder));
        fs::create_dir_all(&bed.0).unwrap();
        // As NVIDIA's: its functions have the library's name for a version.
        let versions = bed.path("cudart.version");
        fs::write(&versions, "libcudart.so.13 { global: *; };\n").unwrap();
        bed.shared("cuda.c", "libcuda.so.1", &[]);
        bed.shared(
            "cudart.c",
            "libcudart.so.13",
            &["-l:libcuda.so.1", &format!("-Wl,--version-script={}", versions.display())],
        );
        bed.shared("gmlake.c", "libgmlake.so", &["-DCOPIES"]);
        bed.program(program);
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The program, which needs the libraries that it calls; others come late.
    fn program(&self, source: &str) {
        let needed = ["-Wl,--as-needed", "-l:libcudart.so.13", "-l:libcuda.so.1", "-lpthread"];
        self.compile(source, "program", &needed);
    }

    /// A library, which calls itself by its file's name.
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

    /// A program under the library, switched on, with the stand-in for `libgmlake.so`.
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

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What it said on both outputs.
fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// It ended well, and had this to say.
fn ends(mut command: Command, out: &str, error: &str) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {} {:?}", output.status, said(&output));
    assert_eq!(said(&output), (out.to_owned(), error.to_owned()), "{command:?}");
}

#[test]
fn what_is_large_is_taken_as_it_was_asked_for() {
    ends(Bed::new("taken", "copies.c").scenario("taken"), "", "");
}

#[test]
fn what_is_small_is_never_asked_about() {
    ends(Bed::new("small", "copies.c").scenario("small"), "", "");
}

#[test]
fn it_is_off_where_nobody_switches_it_on() {
    let bed = Bed::new("off", "entries.c");
    for value in [None, Some(""), Some("0")] {
        let mut command = bed.scenario("off");
        match value {
            Some(value) => command.env("GLAKE_MULTI_PATH", value),
            None => command.env_remove("GLAKE_MULTI_PATH"),
        };
        ends(command, "", "");
    }
    let mut command = bed.scenario("off");
    command.env("GLAKE_MULTI_PATH", "yes");
    let says =
        "glake: this program's copies take one path each: GLAKE_MULTI_PATH = \"yes\": allowed is 0 or 1\n";
    ends(command, "", says);
}

#[test]
fn what_it_does_not_know_passes() {
    let bed = Bed::new("unknown", "copies.c");
    ends(bed.scenario("of-another-kind"), "", "");
    ends(bed.scenario("without-a-context"), "", "");
    ends(bed.scenario("with-an-old-runtime"), "", "");
}

#[test]
fn what_is_not_taken_is_made_natively() {
    ends(Bed::new("not-taken", "copies.c").scenario("not-taken"), "", "");
}

#[test]
fn a_failure_is_told_as_the_runtime_would() {
    let says = "glake: a copy of 3145728 bytes failed: the stand-in was told to fail\n";
    ends(Bed::new("failed", "copies.c").scenario("failed"), "", says);
}

#[test]
fn a_library_that_does_not_serve_is_asked_once() {
    let bed = Bed::new("unavailable", "copies.c");
    let says = "glake: this program's copies take one path each: the stand-in was told to fail\n";
    ends(bed.scenario("unavailable"), "", says);
    ends(bed.scenario("ended"), "ended\n", "");
}

#[test]
fn functions_that_a_program_asks_for_are_ours() {
    ends(Bed::new("entries", "entries.c").scenario("entries"), "", "");
}

#[test]
fn threads_and_forks() {
    let bed = Bed::new("threads", "processes.c");
    ends(bed.scenario("threads"), "", "");
    ends(bed.scenario("forked"), "", "");
    bed.shared("gmlake.c", "slow/libgmlake.so", &["-DCOPIES", "-DSLOW"]);
    let mut meanwhile = bed.scenario("forked-meanwhile");
    meanwhile.env("GLAKE_LIBRARY", bed.path("slow/libgmlake.so"));
    ends(meanwhile, "", "");
}

#[test]
fn a_small_copy_costs_less_than_half_a_microsecond_more() {
    let output = Bed::new("fast", "processes.c").scenario("fast").output().unwrap();
    assert!(output.status.success(), "{:?}", said(&output));
    println!("{}", said(&output).0);
}

#[test]
fn the_library_is_found() {
    let bed = Bed::new("found", "processes.c");
    let mut loaded = bed.scenario("loaded-before");
    loaded.env("STAND_IN_LIBRARY", bed.path("libgmlake.so")).env("GLAKE_LIBRARY", "/no/such.so");
    ends(loaded, "", "");

    bed.program("copies.c");
    let ours = bed.path("libglake_preload.so");
    fs::copy(library(), &ours).unwrap();
    let mut beside = bed.scenario("taken");
    beside.env_remove("GLAKE_LIBRARY").env("LD_PRELOAD", &ours);
    ends(beside, "", "");

    fs::create_dir(bed.path("elsewhere")).unwrap();
    fs::rename(&ours, bed.path("elsewhere/libglake_preload.so")).unwrap();
    let mut by_name = bed.scenario("taken");
    by_name.env("GLAKE_LIBRARY", "").env("LD_PRELOAD", bed.path("elsewhere/libglake_preload.so"));
    by_name.env("LD_LIBRARY_PATH", &bed.0);
    ends(by_name, "", "");
}

#[test]
fn without_the_library_a_program_goes_on() {
    let bed = Bed::new("without", "copies.c");
    bed.shared("gmlake.c", "before/libgmlake.so", &[]);
    bed.shared("gmlake.c", "other/libgmlake.so", &["-DCOPIES", "-DABI=7"]);
    for (file, says) in [
        (PathBuf::from("/no/such.so"), "/no/such.so: cannot open shared object file: No such file"),
        (
            bed.path("before/libgmlake.so"),
            "undefined symbol: glake_copy_try; put libgmlake.so of the same build",
        ),
        (
            bed.path("other/libgmlake.so"),
            "/other/libgmlake.so has interface 7, this is 1: take both from one",
        ),
    ] {
        let output = bed.scenario("without").env("GLAKE_LIBRARY", file).output().unwrap();
        let (out, error) = said(&output);
        assert!(output.status.success() && out.is_empty(), "{error}");
        assert!(error.starts_with("glake: this program's copies take one path each: "), "{error}");
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn libraries_may_come_late_and_under_other_names() {
    let bed = Bed::new("late", "late.c");
    bed.shared("extension.c", "extension.so", &["-l:libcudart.so.13"]);
    // As wheels have it, which give what they bring a name of their own.
    let renamed = "libcudart-d0da41ae.so.12";
    bed.shared("cudart.c", renamed, &["-l:libcuda.so.1"]);
    bed.shared("extension.c", "renamed.so", &[&format!("-l:{renamed}")]);
    for extension in ["extension.so", "renamed.so"] {
        let mut command = bed.under(bed.path("program"));
        command.arg(bed.path(extension));
        // Of the sizes from 1 to 4^11 bytes two are large.
        ends(command, "asked 2\n", "");
    }
}

#[test]
fn the_real_engine_copies_over_its_relays() {
    let bed = Bed::new("engine", "engine.c");
    let mut command = bed.scenario("over-relays");
    command.env("GLAKE_LIBRARY", gmlake()).env("GLAKE_DEVICE", "sim:h200x4");
    // Nobody's calibration, and nobody's ranks.
    command.env("XDG_CACHE_HOME", bed.path("cache"));
    for name in ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"]
    {
        command.env_remove(name);
    }
    ends(command, "", "");
}

#[test]
fn a_program_without_cuda_sees_nothing() {
    let bed = Bed::new("none", "copies.c");
    ends(bed.under("/bin/true"), "", "");
    let mut shell = bed.under("/bin/sh");
    shell.args(["-c", "echo $(echo one | cat) two; exit 0"]);
    ends(shell, "one two\n", "");
    assert_eq!(bed.under("/bin/false").output().unwrap().status.code(), Some(1));
}
