//! `glake run` from outside: what a program is given, and how it ends.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder as an installation has it, which goes when the test does.
struct Installed(PathBuf);

impl Installed {
    /// The command in `bin`; its libraries, which are files only, in a folder of their own.
    fn with_libraries_in(name: &str, libraries: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("glake-run-{}-{name}", std::process::id()));
        for inner in ["bin", libraries] {
            fs::create_dir_all(folder.join(inner)).unwrap();
        }
        let command = folder.join("bin/glake");
        let built = Path::new(env!("CARGO_BIN_EXE_glake"));
        fs::hard_link(built, &command).or_else(|_| fs::copy(built, &command).map(|_| ())).unwrap();
        for library in ["libglake_preload.so", "libgmlake.so"] {
            fs::write(folder.join(libraries).join(library), "").unwrap();
        }
        Installed(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn glake(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/glake"));
        command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").current_dir(&self.0);
        command
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What `env` printed, sorted. The loader says of the empty libraries that they are none, on standard error.
fn variables(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<_> = std::str::from_utf8(&output.stdout).unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn links_are_measured_before_a_program_and_once() {
    let installed = Installed::with_libraries_in("calibrate", "bin");
    let device = crate::two_gpus(std::path::Path::new(&installed.path("")));
    let asked = ["run", "--calibrate", "--device", &device, "--", "true"];
    let told = |cache: &str| {
        let output = installed.glake(&asked).env("XDG_CACHE_HOME", cache).output().unwrap();
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let cache = installed.path("cache");
    assert!(told(&cache).contains(" trials in "));
    assert!(!told(&cache).contains("trials"));
    let (code, error) = refused(installed.glake(&asked));
    assert!(code == 2 && error.contains("transfer.calibrations has to name a folder"), "{error}");
}

/// Exit code, and the one line on standard error.
fn refused(mut command: Command) -> (i32, String) {
    let output = command.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty() && error.lines().count() == 1, "{command:?}: {error}");
    (output.status.code().unwrap(), error)
}

#[test]
fn a_program_is_given_what_it_needs() {
    for libraries in ["bin", "bin/deps", "lib"] {
        let installed = Installed::with_libraries_in("given", libraries);
        let file = |name: &str| installed.path(&format!("{libraries}/{name}"));
        let (preload, library) = (file("libglake_preload.so"), file("libgmlake.so"));
        let expected = |more: &[String]| {
            let given = [format!("GLAKE_LIBRARY={library}"), "PATH=/usr/bin:/bin".to_owned()];
            let mut all = [&given[..], more].concat();
            all.sort();
            all
        };
        let output = installed.glake(&["run", "env"]).output().unwrap();
        assert_eq!(variables(&output), expected(&[format!("LD_PRELOAD={preload}")]));
        let mut command = installed.glake(&["run", "--multi-path", "--", "env"]);
        let output = command.env("LD_PRELOAD", "/other.so").env("GLAKE_MULTI_PATH", "0").output().unwrap();
        let more = ["GLAKE_MULTI_PATH=1".to_owned(), format!("LD_PRELOAD={preload}:/other.so")];
        assert_eq!(variables(&output), expected(&more));
    }
}

#[test]
fn python_finds_the_switch_of_the_allocator_first() {
    let installed = Installed::with_libraries_in("allocator", "bin");
    let asked = ["run", "--allocator", "--", "env"];
    let (code, error) = refused(installed.glake(&asked));
    assert!(code == 1 && error.contains("needs the Python package glake"), "{code} {error}");
    let path = |output: &Output| {
        let given = variables(output);
        assert!(given.contains(&"GLAKE_ALLOCATOR=1".to_owned()), "{given:?}");
        given.iter().find_map(|line| line.strip_prefix("PYTHONPATH=").map(str::to_owned)).unwrap()
    };
    // In a clone the package is in the path already, as a relative folder too.
    fs::create_dir_all(installed.path("clone/glake_switch/path")).unwrap();
    fs::write(installed.path("clone/glake_switch/path/sitecustomize.py"), "").unwrap();
    let found = path(&installed.glake(&asked).env("PYTHONPATH", "/other:clone").output().unwrap());
    assert_eq!(found, format!("{}:/other:clone", installed.path("clone/glake_switch/path")));
    // In a wheel it lies beside the folder of the program; given twice it stays one.
    fs::create_dir_all(installed.path("glake_switch/path")).unwrap();
    fs::write(installed.path("glake_switch/path/sitecustomize.py"), "").unwrap();
    let ours = installed.path("glake_switch/path");
    assert_eq!(path(&installed.glake(&asked).output().unwrap()), ours);
    assert_eq!(
        path(&installed.glake(&asked).env("PYTHONPATH", format!("{ours}:/other")).output().unwrap()),
        format!("{ours}:/other")
    );
}

#[test]
fn vllm_finds_the_plugin() {
    let installed = Installed::with_libraries_in("vllm", "bin");
    let given = variables(&installed.glake(&["run", "--vllm", "--", "env"]).output().unwrap());
    assert!(given.contains(&"GLAKE_VLLM=1".to_owned()), "{given:?}");
    assert!(
        !given.iter().any(|line| line.starts_with("PYTHONPATH=")),
        "the entry point of the wheel is enough: {given:?}"
    );
    let mut listed = installed.glake(&["run", "--vllm", "--", "sh", "-c", "echo $VLLM_PLUGINS"]);
    let output = listed.env("VLLM_PLUGINS", "other").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "other,glake\n");
}

#[test]
fn flags_are_handed_on() {
    let installed = Installed::with_libraries_in("flags", "bin");
    fs::write(installed.path("c.toml"), "").unwrap();
    let flags = ["--config", "c.toml", "--device", "sim:h20x8", "--log", "debug", "run", "--", "env"];
    let given = variables(&installed.glake(&flags).output().unwrap());
    for says in [
        format!("GLAKE_CONFIG={}", installed.path("c.toml")),
        "GLAKE_DEVICE=sim:h20x8".to_owned(),
        "GLAKE_LOG=debug".to_owned(),
    ] {
        assert!(given.contains(&says), "{given:?}");
    }
    let (code, error) = refused(installed.glake(&["--preset", "serverless", "run", "--", "env"]));
    assert!(code == 2 && error.contains("--preset cannot be handed on"), "{code} {error}");
}

#[test]
fn the_exit_code_and_the_arguments_are_the_programs() {
    let installed = Installed::with_libraries_in("code", "bin");
    let script = "printf '%s|' \"$@\"; exit 42";
    let output = installed.glake(&["run", "sh", "-c", script, "sh", "--json", "a b", "--"]).output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(42), &b"--json|a b|--|"[..]));
}

#[test]
fn what_cannot_be_run_is_one_line() {
    let installed = Installed::with_libraries_in("mistakes", "bin");
    fs::write(installed.path("text"), "no program").unwrap();
    let text = installed.path("text");
    for (arguments, says) in [
        (&["run"][..], "<CMD>"),
        (&["run", "--multi-path", "--"], "<CMD>"),
        (&["run", "--multipath", "env"], "'--multipath'"),
        (&["run", "no-such-program"], "no-such-program: no such program; name one in PATH"),
        (&["run", "--", &text], "text cannot be executed: Permission denied"),
    ] {
        let (code, error) = refused(installed.glake(arguments));
        assert!(code == 2 && error.contains(says), "{arguments:?}: {code} {error}");
    }

    let mut elsewhere = installed.glake(&["run", "env"]);
    elsewhere.env("GLAKE_PRELOAD", "/no/such.so");
    let (code, error) = refused(elsewhere);
    assert!(code == 1 && error.contains("/no/such.so is not there"), "{code} {error}");
    for library in ["libgmlake.so", "libglake_preload.so"] {
        fs::remove_file(installed.0.join("bin").join(library)).unwrap();
        let (code, error) = refused(installed.glake(&["run", "env"]));
        let says = format!("bin/{library} is not there: build it with make build, or name it with GLAKE_");
        assert!(code == 1 && error.contains(&says), "{code} {error}");
    }
}

#[test]
fn a_program_that_takes_no_library_is_told_of() {
    let installed = Installed::with_libraries_in("static", "lib");
    // A header of an ELF file with no loader: it does not run either.
    let mut header = vec![0; 64];
    header[..5].copy_from_slice(b"\x7fELF\x02");
    let program = installed.path("linked-statically");
    fs::write(&program, header).unwrap();
    let output = installed.glake(&["run", &program]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let first = error.lines().next().unwrap();
    assert!(
        first.starts_with("glake: ") && first.contains("linked-statically is linked statically"),
        "{error}"
    );
    assert_eq!(output.status.code(), Some(2));
}
