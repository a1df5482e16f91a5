//! Tests of workers that share a GPU.

use std::time::{Duration, Instant};

use glake_units::Bytes;
use glake_wire::{Answer, Ask, Request};

use crate::processes::Node;

fn gib(count: u32) -> f64 {
    f64::from(count) * f64::from(1 << 30)
}

#[test]
fn the_longest_idle_worker_is_the_victim() {
    let node = Node::new(Bytes::gib(24));
    let mut workers: Vec<_> = ["a", "b", "c"].map(|name| node.joined(&format!("{name} 10GiB"))).into();
    for (place, turn) in [0, 1, 2, 0, 1, 2].into_iter().zip(0..) {
        node.visit(&mut workers[place], ["a", "b", "c"][place]);
        node.check();
        if turn > 1 {
            workers[(place + 1) % 3].hear("shrunk").unwrap();
        }
    }
    let rows = node.until("two are resident", |rows| {
        rows.iter().filter(|row| row.resident == Bytes::gib(10)).count() == 2
    });
    assert_eq!(rows.iter().map(|row| row.worker.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
    assert!(rows[0].evicted > Bytes::ZERO && rows[0].predicted_wake_s > 0.0, "{rows:#?}");
    let decisions = node.ask(Ask::Explain).unwrap();
    let Some(Answer::Decision(last)) = decisions.last() else { panic!("{decisions:?}") };
    assert_eq!((last.worker.as_str(), last.outcome.as_str()), ("c", "refilled"));
    assert_eq!((last.taken[0].worker.as_str(), last.taken[0].why.as_str()), ("a", "idle"));
    assert!(last.real_s.is_some() && last.predicted_s > 0.0);
    // Time passes for an agent without events.
    std::thread::sleep(Duration::from_millis(20));
    let later = node.ask(Ask::Explain).unwrap();
    let Some(Answer::Decision(later)) = later.last() else { panic!("{later:?}") };
    assert!(later.ago_s >= last.ago_s + 0.02, "{later:?}");
    let metrics = node.metrics();
    assert_eq!(metrics.of("glake_worker_bytes{worker=\"b\",place=\"resident\"}"), gib(10));
    assert_eq!(metrics.of("glake_gpu_limit_bytes{gpu=\"0\"}"), gib(24) - gib(1) / 2.0);
    // At least three refills of new workers and three of shrunk ones; late victims are asked again.
    assert!(metrics.of("glake_granted_bytes_total{gpu=\"0\"}") >= gib(54), "{metrics:?}");
    assert!(metrics.of("glake_grants_total{gpu=\"0\"}") >= 6.0, "{metrics:?}");
    assert!(metrics.of("glake_shrinks_total{gpu=\"0\"}") >= 4.0, "{metrics:?}");
    assert_eq!(metrics.of("glake_failed_total{what=\"shrink\"}"), 0.0, "{metrics:?}");
}

#[test]
fn a_busy_worker_is_parked_and_comes_back() {
    let node = Node::new(Bytes::gib(14));
    let mut first = node.joined("first 10GiB");
    let mut second = node.joined("second 10GiB");
    first.tell("use");
    first.tell("want");
    first.hear("resident").unwrap();
    second.tell("want");
    first.hear("shrunk").unwrap();
    second.hear("resident").unwrap();
    second.tell("use");
    // The parked worker wants its memory, and parks the other one after its quantum.
    first.hear("resident").unwrap();
    assert!(node.metrics().of("glake_parks_total") >= 2.0);
    second.hear("resident").unwrap();
    node.check();
}

#[test]
fn an_operators_command_waits_its_own_time_and_says_for_what() {
    let node = Node::with(Bytes::gib(24), 512, "[[worker]]\nname = \"model\"\nmax_pause = 0.05\n");
    let mut worker = node.joined("model 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    worker.tell("use");
    node.until("a use runs", |rows| rows[0].state == "busy");
    worker.signal(rustix::process::Signal::STOP);
    let shrink = |seconds| {
        let ask = Ask::Shrink { worker: "model".to_owned() };
        Request::from(ask).within(Duration::from_secs_f64(seconds))
    };
    let awaited = "its uses have to end, or to stop at a safe point";
    let late = node.ask(shrink(0.2)).unwrap_err();
    assert!(late.starts_with(&format!("model: not done within 0.2 s: {awaited}")), "{late}");
    let (path, mut said) = (crate::processes::socket(node.folder.path()), Vec::new());
    let done = glake_agent::ask(&path, shrink(60.0), |why| {
        said.push(why.to_owned());
        worker.signal(rustix::process::Signal::CONT);
    });
    assert!(done.is_ok() && said.first().map(String::as_str) == Some(awaited), "{done:?} {said:?}");
}

#[test]
fn operators_shrink_and_refill() {
    let node = Node::new(Bytes::gib(24));
    let mut worker = node.joined("model 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    node.ask(Ask::Shrink { worker: "model".to_owned() }).unwrap();
    let row = node.ps().remove(0);
    assert_eq!((row.state.as_str(), row.resident, row.leased), ("asleep", Bytes::ZERO, Bytes::ZERO));
    node.ask(Ask::Refill { worker: "model".to_owned() }).unwrap();
    assert_eq!(node.ps().remove(0).resident, Bytes::gib(10));
    let unknown = node.ask(Ask::Shrink { worker: "modal".to_owned() }).unwrap_err();
    assert_eq!(unknown, "no worker is called \"modal\": there are model");
    worker.tell("leave");
    node.until("it has left", <[_]>::is_empty);
}

#[test]
fn a_shrunk_worker_may_need_less_than_before() {
    let node = Node::new(Bytes::gib(14));
    let mut first = node.joined("first 10GiB");
    let mut second = node.joined("second 10GiB");
    first.tell("want");
    first.hear("resident").unwrap();
    // The page is read while the memory is resident.
    node.until("it has its memory", |rows| rows[0].resident == Bytes::gib(10));
    node.ask(Ask::Shrink { worker: "first".to_owned() }).unwrap();
    // The meter is read again before any grant.
    std::thread::sleep(Duration::from_millis(1100));
    second.tell("want");
    second.hear("resident").unwrap();
    first.tell("want");
    first.hear("resident").unwrap();
    node.check();
}

#[test]
fn an_impossible_want_is_denied() {
    let node = Node::new(Bytes::gib(24));
    let mut large = node.joined("large 30GiB");
    large.tell("want");
    assert_eq!(large.hear("denied").unwrap(), "denied TooLarge");
    let refilled = node.ask(Ask::Refill { worker: "large".to_owned() }).unwrap_err();
    assert_eq!(refilled, "large: denied: it needs more than its GPU could ever give");
    assert_eq!(node.metrics().of("glake_denied_total{why=\"too_large\"}"), 2.0);
    let twice = node.worker("large 1GiB");
    let refused = twice.hear("refused").unwrap();
    assert!(refused.contains("a worker called \"large\" is here already"), "{refused}");
}

#[test]
fn unmanaged_memory_is_not_granted() {
    let node = Node::new(Bytes::gib(60));
    // By then, the agent's first reading is old.
    std::thread::sleep(Duration::from_millis(1100));
    // An unmanaged process.
    crate::meter::write(&node.folder.path().join("meter"), std::process::id(), Bytes::gib(65));
    let mut workers: Vec<_> = ["a", "b"].map(|name| node.joined(&format!("{name} 8GiB"))).into();
    for place in [0, 1, 0, 1] {
        workers[place].tell("want");
        workers[place].hear("resident").unwrap();
        let used = glake_meter::Meter::read(&node.meter, "0").unwrap();
        assert!(used.used <= used.total, "{used:?}");
    }
}

#[test]
fn a_hanging_meter_does_not_block_connections() {
    let node = Node::new(Bytes::gib(24));
    let mut workers: Vec<_> = ["a", "b"].map(|name| node.joined(&format!("{name} 10GiB"))).into();
    // By then, the agent's first reading is old.
    std::thread::sleep(Duration::from_millis(1100));
    let hangs = node.folder.path().join("meter").join(crate::meter::HANGS);
    std::fs::write(&hangs, "").unwrap();
    workers[0].tell("want");
    let begin = Instant::now();
    assert_eq!(node.ps().len(), 2);
    assert!(begin.elapsed() < Duration::from_millis(900), "an operator is answered meanwhile");
    workers[0].hear("resident").unwrap();
    workers[1].tell("want");
    workers[1].hear("resident").unwrap();
    node.agent.signal(rustix::process::Signal::TERM);
    node.agent.hear("ended").unwrap();
}

#[test]
fn an_agent_without_waiters_sleeps() {
    let node = Node::new(Bytes::gib(24));
    let mut worker = node.joined("model 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    // Its remaining work is over by then.
    std::thread::sleep(Duration::from_secs(1));
    let before = node.wakes();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(node.wakes(), before);
}
