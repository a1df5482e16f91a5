//! A worker that the driver checkpoints while nothing of it is resident.

use glake_meter::Meter as _;
use glake_meter::checkpoint::{ProcessCheckpoint as _, ProcessState, bring_back, put_away};
use glake_sim::{SimCheckpoint, SimMeter, load};

use super::*;

/// It says that it wants its memory though each of its calls of the driver waits, and has its bytes when it is back.
#[test]
fn a_worker_that_is_checkpointed_wants_its_memory_and_has_its_bytes() {
    let (socket, gpus) = (Socket::new(), tempfile::tempdir().unwrap());
    let device = format!("sim:h200x4@{}", gpus.path().display());
    let process = worker("", &[("GLAKE_DEVICE", &device)]);
    let block = process.block("weights", mib(12));
    let mut agent = std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        let agent = socket.welcome(5);
        joined.join().unwrap().unwrap();
        agent
    });
    let topology = load("h200x4").unwrap();
    let driver = SimCheckpoint::open(gpus.path(), &topology).unwrap();
    let meter = SimMeter::open(gpus.path(), &topology).unwrap();
    let pid = std::process::id();
    let used = || meter.read("0").unwrap().of_process(pid);
    for _ in 0..2 {
        agent.shrink(mib(28));
        let (held, _) = agent.shrunk();
        assert_eq!((held.lease, held.resident, held.evicted), (mib(0), mib(0), mib(12)));
        let context = used();
        assert_eq!(context, mib(640));
        put_away(&driver, pid, Duration::from_secs(2)).unwrap();
        assert_eq!(used(), mib(0));
        std::thread::scope(|scope| {
            let used = scope.spawn(|| process.regions().begin_use(&Tags::All, WhenClosed::Refill, None));
            let held = agent.wanted();
            assert_eq!((held.resident, held.evicted), (mib(0), mib(12)));
            assert_eq!(driver.state(pid).unwrap(), ProcessState::Checkpointed);
            bring_back(&driver, pid).unwrap();
            agent.grant(mib(28));
            agent.say(ToWorker::Admit);
            assert_eq!(agent.refilled().resident, mib(12));
            let id = used.join().unwrap().unwrap();
            assert!(process.has(block, mib(12), 7));
            process.regions().gate().end_use(id).unwrap();
        });
    }
    process.agent().leave();
    process.free(block).unwrap();
}
