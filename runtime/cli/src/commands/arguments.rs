//! Arguments of the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::{bench, checkpoint, demo, doctor, node, plan, replay, run, serve, top, topo};
use glake_runtime::config::{DeviceChoice, Environment, Preset, Setting, Sources};

const EXAMPLES: &str = "\
Examples:
  glake demo
      the whole story on real bytes, without a GPU
  glake replay tests/traces/opt13_LR.trace.gz
      how much memory this run needs under each policy
  glake replay --find-limit --policy glake,caching snapshot.pickle
  glake plan examples/workers.toml examples/requests.csv
  glake serve node.toml
      workers share the GPUs of this server
  glake top
      who has the GPUs' memory, who waits for it, for whom and why
  glake topo --device sim:h20x8
      a published server, drawn
  glake doctor
      what this machine can do, and what to change
  glake bench alloc --json
      the hot path of malloc and free
  glake bench copy
      copies over every link, beside one
  glake run --multi-path -- python train.py
      a program whose copies use every link

Units:       sizes are bytes or a number and a unit of 1024s: 512KiB, 16MiB,
             32GiB
Settings:    flags go over the environment, over the file, over the preset, over
             the defaults
Environment: GLAKE_CONFIG, GLAKE_DEVICE, GLAKE_LOG; GLAKE_AGENT of the agent's
             commands; GLAKE_MULTI_PATH, GLAKE_ALLOCATOR, GLAKE_VLLM,
             GLAKE_DISABLE, GLAKE_LIBRARY and GLAKE_PRELOAD of glake run;
             NO_COLOR; GMLake's vmmDefragment, fragment_limit, fragLimit,
             reuseLimit, defragment_level, defragLevel, auto_gc_limits, autoGC
Exit codes:  0 done, 1 failed (out of memory in a replay too), 2 usage or bad
             input";

/// GLake: a runtime for the memory of a GPU server
#[derive(Debug, Parser)]
#[command(name = "glake", version, after_help = EXAMPLES, arg_required_else_help = true, max_term_width = 80)]
pub struct Arguments {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// Command that the user chose.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// Device to run on: auto (CUDA where a driver answers, else the simulator), cuda, sim or sim:TOPOLOGY; processes
    /// that name the same @/FOLDER after sim share the simulated GPUs
    #[arg(long, global = true, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
    /// Settings from this TOML file [default: the file that GLAKE_CONFIG names, if any]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Start from the settings of a preset: serverless
    #[arg(long, global = true, value_name = "NAME")]
    pub preset: Option<Preset>,
    /// Print one JSON object a line, and nothing else, on standard output
    #[arg(long, global = true)]
    pub json: bool,
    /// Log filter for standard error: off, error, warn, info, debug, trace, or a tracing filter such as warn,glake::transfer=debug
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,
}

/// Command of the command line.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows every feature on real bytes, in under a minute without a GPU
    ///
    /// Fragments are stitched into one range, what was written through one address is read back through another,
    /// memory passes between streams, goes back to the device and grows again. A copy takes every link; an idle region
    /// leaves its GPU and comes back while others work. Every byte is checked.
    Demo(demo::DemoArguments),
    /// Measure how much memory recorded programs need, under GLake and under PyTorch's allocators
    ///
    /// Reads traces v1 and v2 (plain or gzip) and the pickles of torch.cuda.memory._dump_snapshot(). The policy
    /// glake is the product: it runs on the device, with real driver calls and real bytes. The others are models
    /// that never touch a device: gmlake is the paper's, caching and expandable are PyTorch's own.
    Replay(replay::ReplayArguments),
    /// Predict how long requests would wait for workers that share GPUs, under GLake's and other policies
    ///
    /// GLake's arbiter in virtual time, over the workers of a file and the requests of a trace: no GPU is
    /// asked. Workers' memory leaves and comes back at the speeds of a calibration.
    Plan(plan::PlanArguments),
    /// Run the node agent, which decides whose memory is on the GPUs of this server
    ///
    /// It starts the workers of its file that have a command; others connect to its socket (glake.join(), or GLAKE_AGENT
    /// in their environment). The agent gives memory to the workers that need it: idle workers' memory leaves first, then that of busy ones
    /// that can be parked between two steps. The agent has no CUDA context and none of the memory; workers go on
    /// without it.
    Serve(serve::ServeArguments),
    /// The workers of the node agent: what they do, and how much of their memory is where
    Ps(node::PsArguments),
    /// A worker's memory leaves its GPUs, once its uses have ended or stopped between two steps
    Shrink(node::WorkerArguments),
    /// A worker's memory comes back to its GPUs; one of the file that does not run is started
    Refill(node::WorkerArguments),
    /// A worker of the agent's file is started, unless it runs: ends when it has joined and loaded
    Start(node::WorkerArguments),
    /// A worker that the agent has started ends, and is not started again until somebody asks for it
    ///
    /// SIGTERM to all its processes, after 10 s SIGKILL: ends when they have. --all ends the agent and all workers that it has started; if
    /// the agent has ended already, its workers.
    Stop(node::StopArguments),
    /// The last decisions of the node agent: who waited, who was chosen, why, predicted and real times
    Explain(node::ExplainArguments),
    /// Who has the GPUs' memory, who waits for it, for whom and why, on a screen that follows it
    ///
    /// Works with a node agent, and without one over the counters that processes publish.
    Top(top::TopArguments),
    /// A process that was shrunk leaves its GPUs wholly, its context too, and comes back
    ///
    /// The driver's checkpoint: it locks the process, takes what it has on GPUs to host memory, and gives the GPUs' memory
    /// back. glake serve asks this by itself where its file has checkpoint_after_s.
    Checkpoint(checkpoint::CheckpointArguments),
    /// Devices and the links between them, drawn
    Topo(topo::TopoArguments),
    /// Check what this machine supports, and advise what to change
    ///
    /// Checks the driver, the GPUs and their peer access, the host's memory and limits, the libraries,
    /// PyTorch and the settings in effect. Each check is ok, a note or a problem, with a line of advice.
    Doctor(doctor::DoctorArguments),
    /// Run one of the measurements
    #[command(subcommand, arg_required_else_help = true)]
    Bench(bench::Bench),
    /// A program, unchanged, with its copies in GLake's hands
    ///
    /// CMD runs in this process's place, under the preload library: with --multi-path its large copies between host and GPU
    /// use the links of every visible GPU. Which copies are taken stands in docs/SEMANTICS.md, Preload.
    Run(run::RunArguments),
}

impl Global {
    /// Returns the sources of the configuration.
    pub fn sources(&self, environment: Environment) -> Sources {
        let device = self.device.as_ref().map(|d| Setting::flag("--device", "device.choice", d.to_string()));
        let log = self.log.as_deref().map(|filter| Setting::flag("--log", "log.filter", filter));
        Sources {
            preset: self.preset,
            file: self.config.clone(),
            environment,
            flags: device.into_iter().chain(log).collect(),
            directory: None,
        }
    }
}

impl Command {
    /// Returns the settings that the command's flags set.
    pub fn settings(&self) -> Vec<Setting> {
        match self {
            Command::Replay(arguments) => arguments.settings(),
            Command::Demo(_)
            | Command::Plan(_)
            | Command::Serve(_)
            | Command::Ps(_)
            | Command::Shrink(_)
            | Command::Refill(_)
            | Command::Start(_)
            | Command::Stop(_)
            | Command::Explain(_)
            | Command::Top(_)
            | Command::Checkpoint(_)
            | Command::Topo(_)
            | Command::Doctor(_)
            | Command::Bench(_)
            | Command::Run(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn are_well_formed() {
        Arguments::command().debug_assert();
    }
}
