//! `glake run`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;

use super::arguments::Global;
use super::output::note;
use super::{Failure, program};
use crate::installed::{LIBGMLAKE, Library, PRELOAD};
use glake_runtime::calibrations::Calibrations;
use glake_runtime::config::{Config, Environment};

/// Arguments of `glake run`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct RunArguments {
    /// Large copies use the links of every visible GPU (sets GLAKE_MULTI_PATH=1)
    #[arg(long)]
    multi_path: bool,
    /// GLake is torch's CUDA allocator in every Python process that CMD starts (sets GLAKE_ALLOCATOR=1)
    #[arg(long)]
    allocator: bool,
    /// vLLM's engines run over GLake: they sleep and wake, and share a GPU (sets GLAKE_VLLM=1; needs the wheel)
    #[arg(long)]
    vllm: bool,
    /// Measure the links first, in about two seconds, unless that was done since the machine was started
    #[arg(long)]
    calibrate: bool,
    /// The program and its arguments; -- before it is allowed and never needed
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  glake run --multi-path -- python train.py
      .to(\"cuda\") and .cpu() use every link
  glake run --allocator -- torchrun --nproc-per-node 2 train.py
      torch's memory comes from GLake, without a line of code
  glake run --vllm -- vllm serve MODEL
      the engine's memory leaves the GPU and comes back; with GLAKE_AGENT also
      while it answers, to make room for others
  glake run --multi-path --calibrate --config my.toml -- ./a.out
  glake run -- env | grep LD_PRELOAD
      what a program is given

CMD is given: LD_PRELOAD (libglake_preload.so before what was there),
GLAKE_LIBRARY (libgmlake.so), with --multi-path GLAKE_MULTI_PATH=1, with
--allocator GLAKE_ALLOCATOR=1 and a folder of the Python package glake first in
PYTHONPATH; with --vllm GLAKE_VLLM=1, and glake in VLLM_PLUGINS where that is
set; and GLAKE_CONFIG, GLAKE_DEVICE and GLAKE_LOG for --config, --device and
--log. Without GLAKE_MULTI_PATH its copies are as they were. GLAKE_DISABLE=1
switches GLake off in CMD, whatever else is set.

Allocator:    a process enables GLake when it first initialises CUDA; if that
              fails it prints one warning and keeps torch's own; an allocator
              that the program chooses itself stays. python -m glake says
              whether a process would be on

Libraries:    beside glake, or in ../lib, or those that GLAKE_PRELOAD and
              GLAKE_LIBRARY name
Out of reach: programs that are linked statically or setuid, or have CUDA's
runtime linked into
              them (nvcc's default; -cudart shared makes it a library, as torch
              has it)
Exit codes:   CMD's own; 1 a library is missing, 2 usage, or CMD cannot be
              executed";

/// Folder for Python's module path that switches the allocator on, in the folder that holds the package.
const SWITCH: &str = "glake_switch/path";

/// Variables set for the command in addition to this process's environment.
type Variables = Vec<(&'static str, OsString)>;

/// Becomes the program; returns only where that fails.
pub(super) fn run(
    arguments: &RunArguments,
    global: &Global,
    environment: &Environment,
    config: &Config,
) -> Result<(), Failure> {
    let [name, rest @ ..] = arguments.command.as_slice() else {
        return Err(Failure::usage("run: which program? glake run [--multi-path] -- CMD ARGS"));
    };
    let variables = variables(arguments, global, environment)?;
    if arguments.calibrate {
        calibrate(config, &variables)?;
    }
    if let Some(why) = program::found(name, environment).and_then(|path| program::refusal(&path)) {
        note(why);
    }
    let error = Command::new(name).args(rest).envs(variables).exec();
    let name = name.to_string_lossy();
    Err(match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::usage(format!("run: {name}: no such program; name one in PATH, or a path to one"))
        }
        _ => Failure::usage(format!("run: {name} cannot be executed: {error}")),
    })
}

/// Has the links measured where they were not: by a process of its own, for a program inherits no contexts.
fn calibrate(config: &Config, variables: &Variables) -> Result<(), Failure> {
    let folder = config.transfer.calibrations.as_deref();
    if folder.is_none_or(|folder| folder.as_os_str().is_empty()) {
        return Err(Failure::usage(
            "run: --calibrate has no place for what it measures: transfer.calibrations has to name a folder",
        ));
    }
    let backend = super::found(config)?;
    if Calibrations::of(&backend.topology()?, folder).measured().is_some() {
        return Ok(());
    }
    let handed_on =
        |(name, _): &&(&str, OsString)| ["GLAKE_CONFIG", "GLAKE_DEVICE", "GLAKE_LOG"].contains(name);
    let handed_on = variables.iter().filter(handed_on).map(|(name, value)| (*name, value));
    let glake = std::env::current_exe().map_err(Failure::failed)?;
    let mut measures = Command::new(glake);
    let measures = measures.args(["topo", "--calibrate"]).envs(handed_on).stdout(Stdio::null());
    match measures.status().map_err(Failure::failed)?.success() {
        true => Ok(()),
        false => {
            Err(Failure::failed("run: the links cannot be measured, as said above: leave --calibrate out"))
        }
    }
}

fn variables(
    arguments: &RunArguments,
    global: &Global,
    environment: &Environment,
) -> Result<Variables, Failure> {
    if global.preset.is_some() {
        return Err(Failure::usage(
            "run: --preset cannot be handed on to a program: write its settings into a file, and name that with --config",
        ));
    }
    let preload = installed(PRELOAD, "GLAKE_PRELOAD", environment)?;
    let mut variables = vec![
        ("LD_PRELOAD", preloads(&preload, environment.get("LD_PRELOAD"))?),
        ("GLAKE_LIBRARY", installed(LIBGMLAKE, "GLAKE_LIBRARY", environment)?.into_os_string()),
    ];
    if arguments.allocator {
        variables.push(("GLAKE_ALLOCATOR", "1".into()));
        variables.push(("PYTHONPATH", python_path(environment)?));
    }
    if arguments.vllm {
        variables.push(("GLAKE_VLLM", "1".into()));
        variables.extend(plugins(environment.get("VLLM_PLUGINS")).map(|plugins| ("VLLM_PLUGINS", plugins)));
    }
    if arguments.multi_path {
        variables.push(("GLAKE_MULTI_PATH", "1".into()));
    }
    if let Some(config) = &global.config {
        let config = std::path::absolute(config).unwrap_or_else(|_| config.clone());
        variables.push(("GLAKE_CONFIG", config.into_os_string()));
    }
    variables.extend(global.device.as_ref().map(|device| ("GLAKE_DEVICE", device.to_string().into())));
    variables.extend(global.log.as_ref().map(|filter| ("GLAKE_LOG", filter.into())));
    Ok(variables)
}

/// Returns vLLM's list of plugins with ours; `None` where there is no list, for then vLLM loads all of them, or ours is in it.
fn plugins(before: Option<&OsStr>) -> Option<OsString> {
    let before = before.map(OsStr::as_bytes)?;
    let is_there = before.split(|byte| *byte == b',').any(|name| name == b"glake");
    let list = [before, if before.is_empty() { b"glake" } else { b",glake" }].concat();
    (!is_there).then(|| OsString::from_vec(list))
}

/// Returns the module path with the folder first whose `sitecustomize` the interpreter imports as it starts: that of the wheel which
/// this program is part of, or that of a package in the path.
fn python_path(environment: &Environment) -> Result<OsString, Failure> {
    let path = environment.get("PYTHONPATH").unwrap_or_default();
    let package =
        std::env::current_exe().ok().and_then(|program| Some(program.parent()?.parent()?.to_owned()));
    let folders = package.into_iter().chain(std::env::split_paths(path));
    let found =
        folders.map(|folder| folder.join(SWITCH)).find(|folder| folder.join("sitecustomize.py").is_file());
    let Some(folder) = found else {
        return Err(Failure::failed(format!(
            "run: --allocator needs the Python package glake, and {SWITCH} is neither beside this program nor in a folder of \
             PYTHONPATH: use the glake command of the wheel (pip install), or add ffi/python of a clone to PYTHONPATH"
        )));
    };
    let folder = std::path::absolute(&folder).unwrap_or(folder);
    let others = std::env::split_paths(path).filter(|other| !path.is_empty() && *other != folder);
    std::env::join_paths([folder.clone()].into_iter().chain(others)).map_err(|_| {
        Failure::failed(format!(
            "run: {} has a colon in its path, which PYTHONPATH takes for the end of it: install the package elsewhere",
            folder.display()
        ))
    })
}

fn installed(library: Library, variable: &str, environment: &Environment) -> Result<PathBuf, Failure> {
    let named = environment.get(variable).filter(|named| !named.is_empty());
    library.find(named.map(Path::new)).map_err(|looked_for| {
        let looked_for = looked_for.display();
        Failure::failed(format!(
            "run: {looked_for} is not there: build it with make build, or name it with {variable}"
        ))
    })
}

/// The list with our library first.
fn preloads(ours: &Path, before: Option<&OsStr>) -> Result<OsString, Failure> {
    let separates = |byte: &u8| matches!(byte, b' ' | b':');
    if ours.as_os_str().as_bytes().iter().any(separates) {
        return Err(Failure::failed(format!(
            "run: {} has a space or a colon in its path, which LD_PRELOAD takes for the end of it: move the library, and \
             name it with GLAKE_PRELOAD",
            ours.display()
        )));
    }
    let mut list = ours.as_os_str().to_owned();
    let before = before.map(OsStr::as_bytes).unwrap_or_default();
    for other in
        before.split(separates).filter(|other| !other.is_empty() && *other != ours.as_os_str().as_bytes())
    {
        list.push(":");
        list.push(OsStr::from_bytes(other));
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_goes_before_what_was_preloaded() {
        let list = |before: Option<&str>| {
            preloads(Path::new("/lib/ours.so"), before.map(OsStr::new)).unwrap().into_string().unwrap()
        };
        assert_eq!(list(None), "/lib/ours.so");
        assert_eq!(list(Some("")), "/lib/ours.so");
        assert_eq!(list(Some("a.so b.so")), "/lib/ours.so:a.so:b.so");
        assert_eq!(list(Some("a.so:/lib/ours.so::b.so")), "/lib/ours.so:a.so:b.so");
    }

    #[test]
    fn a_list_of_plugins_gets_ours_once() {
        let list = |before: &str| plugins(Some(OsStr::new(before))).map(|list| list.into_string().unwrap());
        assert_eq!(plugins(None), None, "vLLM loads all");
        assert_eq!(list("lora_filesystem_resolver"), Some("lora_filesystem_resolver,glake".into()));
        assert_eq!(list(""), Some("glake".into()));
        assert_eq!(list("other,glake"), None);
    }

    #[test]
    fn a_path_that_the_list_cannot_hold_is_refused() {
        for path in ["/my libraries/ours.so", "/a:b/ours.so"] {
            assert!(matches!(preloads(Path::new(path), None), Err(Failure::Failed(_))));
        }
    }
}
