//! Checks of a program's environment: libraries, PyTorch, variables and the configuration file.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Check;
use crate::installed::{LIBGMLAKE, Library, PRELOAD};
use glake_runtime::config::{Environment, Sources};

/// Our variables; others that begin like them are most likely misspelt.
const VARIABLES: [&str; 12] = [
    "GLAKE_AGENT",
    "GLAKE_ALLOCATOR",
    "GLAKE_CONFIG",
    "GLAKE_DEVICE",
    "GLAKE_DISABLE",
    "GLAKE_LIBRARY",
    "GLAKE_LOG",
    "GLAKE_MULTI_PATH",
    "GLAKE_PRELOAD",
    "GLAKE_START",
    "GLAKE_VLLM",
    "GLAKE_WORKER",
];

/// Python program that prints the versions of torch and its CUDA, and whether the package is installed.
const QUESTION: &str = "\
import importlib.util as u
if u.find_spec('torch'):
    import torch
    print(torch.__version__, torch.version.cuda)
    print('glake' if u.find_spec('glake') else '')
";

/// Looks at what programs find. `python` is its file, where there is one.
pub(crate) fn checks(sources: &Sources, python: Option<PathBuf>) -> Vec<Check> {
    let environment = &sources.environment;
    let library = |check, library: Library, variable, good_for| {
        let named = environment.get(variable).filter(|named| !named.is_empty());
        match library.find(named.map(Path::new)) {
            Ok(path) => Check::ok(check, path.display().to_string(), good_for),
            Err(path) => Check::note(
                check,
                format!("{} is not there", path.display()),
                format!("build it with make build, or name it with {variable}"),
            ),
        }
    };
    vec![
        library(
            "library",
            LIBGMLAKE,
            "GLAKE_LIBRARY",
            "glake bench alloc and copy, and programs in C, use it",
        ),
        library("preload", PRELOAD, "GLAKE_PRELOAD", "glake run --multi-path uses it"),
        torch(python.as_deref()),
        variables(environment),
        settings(sources),
    ]
}

fn torch(python: Option<&Path>) -> Check {
    const NAME: &str = "torch";
    let Some(python) = python else {
        return Check::note(NAME, "no python3 in PATH", "only programs of PyTorch need it");
    };
    let shown = python.display();
    let answer = said(python, &["-c", QUESTION]);
    let mut lines = answer.as_deref().unwrap_or_default().lines();
    let Some(version) = lines.next() else {
        return Check::note(NAME, format!("{shown} does not find it"), "only programs of PyTorch need it");
    };
    let Some((torch, cuda)) = version.split_once(' ').filter(|(_, cuda)| *cuda != "None") else {
        return Check::note(NAME, format!("{version}, without CUDA"), "install a build of torch for CUDA");
    };
    let torch = format!("{torch}, CUDA {cuda}");
    if lines.next() != Some("glake") {
        return Check::note(
            NAME,
            format!("{torch}; {shown} does not find the package glake"),
            "install what make wheel builds, then call glake.enable()",
        );
    }
    let told = said(python, &["-m", "glake"]).unwrap_or_default();
    let line = |name| told.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    match (line("backend "), line("switch ")) {
        (Some(backend), Some(switch)) => {
            Check::ok(NAME, format!("{torch}; backend {backend}; without a call {switch}"), SWITCHED)
        }
        _ => Check::note(NAME, format!("{torch}; no backend of glake"), "python -m glake says why"),
    }
}

const SWITCHED: &str = "glake.enable(), or glake run --allocator -- CMD; python -m glake tells more";

/// Runs a program and returns its standard output; `None` if it cannot be started.
fn said(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn variables(environment: &Environment) -> Check {
    const NAME: &str = "variables";
    let set: Vec<String> = (environment.variables())
        .filter_map(|name| name.to_str().filter(|name| name.starts_with("GLAKE_")).map(str::to_owned))
        .collect();
    let shown = set.iter().map(|name| {
        let value = environment.get(name).unwrap_or_default();
        format!("{name}={}", value.to_string_lossy())
    });
    let shown: Vec<String> = shown.collect();
    match set.iter().find(|name| !VARIABLES.contains(&name.as_str())) {
        _ if set.is_empty() => Check::ok(NAME, "no GLAKE_* is set", "glake --help lists them"),
        None => Check::ok(NAME, shown.join(" "), "they go over the file of settings"),
        Some(unknown) => Check::note(
            NAME,
            shown.join(" "),
            format!("{unknown} is none of ours: {} are", VARIABLES.join(", ")),
        ),
    }
}

fn settings(sources: &Sources) -> Check {
    const NAME: &str = "settings";
    let preset = sources.preset.map(|preset| format!("preset {}", preset.name()));
    let file = sources.file_in_effect().map(|file| file.display().to_string());
    let found: Vec<String> = preset.into_iter().chain(file).collect();
    match found.is_empty() {
        true => {
            Check::ok(NAME, "the defaults", "docs/TUNING.md lists what --config FILE or GLAKE_CONFIG can set")
        }
        false => Check::ok(NAME, found.join(", then "), "docs/TUNING.md lists what can be set"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_variable_of_nobody_is_noted() {
        let of = |names: &[(&str, &str)]| variables(&names.iter().copied().collect());
        assert_eq!(of(&[("PATH", "/bin")]).state, State::Ok);
        assert_eq!(of(&[("GLAKE_LOG", "debug")]).found, "GLAKE_LOG=debug");
        let check = of(&[("GLAKE_CONFG", "x.toml")]);
        assert!(
            check.state == State::Note && check.advice.starts_with("GLAKE_CONFG is none of ours"),
            "{check:?}"
        );
    }

    #[test]
    fn torch_is_asked_for_only_where_python_is() {
        assert_eq!(torch(None).found, "no python3 in PATH");
        assert!(torch(Some(Path::new("/bin/true"))).found.ends_with("does not find it"));
    }
}
