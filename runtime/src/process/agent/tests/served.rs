//! Beside an agent that runs, on a thread of this process.

use super::*;

/// A real agent, on a thread of this process.
pub(super) fn real_agent(folder: &TempDir, node: &str) -> (PathBuf, String) {
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let (gpus, socket) = (folder.path().join("gpus"), folder.path().join("agent.sock"));
    std::fs::create_dir_all(&gpus).unwrap();
    let meter = glake_sim::SimMeter::open(&gpus, &glake_sim::load("h200x4").unwrap()).unwrap();
    let limit = glake_agent::DriverCommand::LIMIT;
    let driver = glake_agent::DriverCommand { program: "/bin/false".into(), arguments: Vec::new(), limit };
    let file = glake_arbiter::node::NodeFile::parse(node).unwrap();
    let launcher = glake_agent::Launcher::default();
    let options = glake_agent::Options {
        file,
        path: None,
        socket: socket.clone(),
        meter: Arc::new(meter),
        driver,
        launcher,
        stops_workers: false,
    };
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || glake_agent::serve(&options, |_| ready.send(()).unwrap()).unwrap());
    is_ready.recv().unwrap();
    (socket, format!("sim:h200x4@{}", gpus.display()))
}

#[test]
fn a_worker_that_fills_its_gpu_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let (path, device) =
        real_agent(&folder, "[node]\nbudget = \"704MiB\"\nreserve = \"0B\"\nfloor = \"640MiB\"\n");
    let process = worker("", &[("GLAKE_DEVICE", &device)]);
    process.agent().join(Some("chat"), Some(&path)).unwrap();
    // 56 of the 64 MiB beside its context; lease.growth is 16 MiB.
    let block = process.block("weights", mib(56));
    use_all(&process).unwrap();
    glake_agent::ask(&path, glake_wire::Ask::Shrink { worker: "chat".to_owned() }).unwrap();
    let used = use_all(&process).map_err(|error| error.to_string());
    let asked = glake_agent::ask(&path, glake_wire::Ask::Refill { worker: "chat".to_owned() });
    process.agent().leave();
    process.regions().refill(&Refill::default()).unwrap();
    process.free(block).unwrap();
    assert!(used.is_ok() && asked.is_ok(), "{used:?}\n{:?}", asked.map_err(|error| error.to_string()));
}

#[test]
fn what_was_decommitted_is_committed_under_an_agent() {
    let folder = tempfile::tempdir().unwrap();
    let (path, device) = real_agent(&folder, "[node]\nfloor = \"640MiB\"\n");
    let process = worker("lease.grow_timeout_ms = 2000", &[("GLAKE_DEVICE", &device)]);
    process.agent().join(Some("chat"), Some(&path)).unwrap();
    let block = process.block("cache", mib(64));
    use_all(&process).unwrap();
    let tail = Address(block.0 + mib(16).get());
    assert_eq!(process.regions().decommit(tail, mib(48)).unwrap(), mib(48));
    // The agent takes what nobody uses, as it does for another worker.
    glake_agent::ask(&path, glake_wire::Ask::Shrink { worker: "chat".to_owned() }).unwrap();
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, Some(LONG)).unwrap();
    let committed = process.regions().commit(tail, mib(48)).map_err(|error| error.to_string());
    process.regions().gate().end_use(id).unwrap();
    process.agent().leave();
    process.free(block).unwrap();
    assert_eq!(committed, Ok(mib(48)), "on an empty GPU of 141 GB");
}
