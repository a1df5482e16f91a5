//! Commands of an agent that goes away, or that cannot be carried out.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::process::Shrink;

fn hears_within(agent: &mut Agent, time: Duration, is: impl Fn(&ToAgent) -> bool) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < time {
        match agent.hear_now() {
            Some(said) if is(&said) => return true,
            Some(_) => {}
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    false
}

#[test]
fn parked_uses_go_on_when_the_agent_is_replaced_between_the_shrinks_of_two_gpus() {
    let socket = Socket::new();
    let process = worker_without_quantum();
    let first = process.block("weights", mib(12));
    process.regions().enter("weights").unwrap();
    let second = process.malloc(1, mib(12), STREAM).unwrap();
    process.regions().leave().unwrap();
    let mut agent = join(&process, &socket);
    let (is_over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    // The first shrink takes a while, here in a hook of the program's.
    let (begun, go_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (told, may) = (begun.clone(), go_on.clone());
    let hook = move |event: &str| {
        if event.contains("\"shrink\"") {
            told.store(true, Ordering::SeqCst);
            while !may.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        0
    };
    process.regions().set_hooks(Some(Arc::new(hook)), None, None);
    let went_on = std::thread::scope(|scope| {
        scope.spawn(|| step(&process, &steps, &is_over));
        until("steps", || (steps.load(Ordering::SeqCst) > 3).then_some(()));
        agent.say(ToWorker::Park { within_ms: 60_000 });
        agent.hear_until("parked", |said| matches!(said, ToAgent::Parked).then_some(()));
        for (gpu, more) in [("0", true), ("1", false)] {
            let (gpu, tier) = (gpu.to_owned(), Tier::Host);
            agent.say(ToWorker::Shrink { gpu, bytes: mib(12), tier, within_ms: 60_000, more });
        }
        until("the first shrink", || begun.load(Ordering::SeqCst).then_some(()));
        // The agent is killed, and another one is there at once, which grants whatever is wanted.
        drop(agent);
        let mut agent = socket.welcome(2);
        go_on.store(true, Ordering::SeqCst);
        let (begin, mut before, mut went_on) = (Instant::now(), None, false);
        while !went_on && begin.elapsed() < Duration::from_secs(12) {
            match agent.hear_now() {
                Some(ToAgent::Want { .. }) => {
                    agent.grant(mib(12));
                    agent.say(ToWorker::Grant { gpu: "1".to_owned(), bytes: mib(12) });
                    agent.say(ToWorker::Admit);
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            if begin.elapsed() > Duration::from_secs(2) {
                let now = steps.load(Ordering::SeqCst);
                went_on = *before.get_or_insert(now) + 3 < now;
            }
        }
        // So that the test ends.
        is_over.store(true, Ordering::SeqCst);
        process.agent().leave();
        process.regions().refill(&Refill::default()).unwrap();
        went_on
    });
    process.regions().set_hooks(None, None, None);
    [first, second].into_iter().for_each(|block| process.free(block).unwrap());
    assert!(went_on, "the parked use waits for ever: nobody asks for its memory");
}

#[test]
fn a_command_that_fails_for_many_regions_is_answered() {
    let socket = Socket::new();
    let process = worker("", &[]);
    for number in 0..1700 {
        // As of conversations that have a region each.
        let tag = format!("session-{number:08}-0000-4000-8000-000000000000");
        process.regions().define(RegionOptions { policy: Policy::Keep, ..RegionOptions::of(&tag) }).unwrap();
        process.regions().enter(&tag).unwrap();
        process.malloc(0, mib(1), STREAM).unwrap();
        process.regions().leave().unwrap();
    }
    let mut agent = join(&process, &socket);
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
    let bytes = agent.hello.holdings[0].lease.saturating_sub(mib(4));
    let (gpu, tier) = ("0".to_owned(), Tier::Host);
    agent.say(ToWorker::Shrink { gpu, bytes, tier, within_ms: 50, more: false });
    // A gap is a panic of this agent's.
    let is_failed = |said: &ToAgent| matches!(said, ToAgent::Failed { .. });
    let is_shrunk = |said: &ToAgent| matches!(said, ToAgent::Shrunk { .. });
    let quietly =
        |what: &mut dyn FnMut() -> bool| std::panic::catch_unwind(std::panic::AssertUnwindSafe(what)).ok();
    let first = quietly(&mut || {
        let failed = hears_within(&mut agent, Duration::from_secs(4), is_failed);
        process.regions().gate().end_use(id).unwrap();
        agent.shrink(mib(8));
        failed && hears_within(&mut agent, Duration::from_secs(4), is_shrunk)
    });
    // As an agent does after a gap: the connection ends, and the conversation goes on over the next one.
    let again = first.is_none().then(|| {
        let conversation = std::mem::take(&mut agent.conversation);
        agent.stream.shutdown(std::net::Shutdown::Both).unwrap();
        agent = socket.accept();
        agent.conversation = conversation;
        agent.conversation.resume(agent.hello.received);
        let received = agent.conversation.received();
        agent.welcome(Welcome { epoch: EPOCH, received, worker: 1, wait: false });
        quietly(&mut || hears_within(&mut agent, Duration::from_secs(4), is_shrunk))
    });
    process.agent().leave();
    assert_eq!(first, Some(true), "None: a gap; and over the next connection: {again:?}");
}

/// What the program has shrunk itself stays away until it asks for it.
fn shrunk_by_the_program(unparks: impl FnOnce(&Socket, Agent) -> Agent) {
    let socket = Socket::new();
    let process = worker_without_quantum();
    let block = process.block("weights", mib(12));
    let agent = join(&process, &socket);
    let (is_over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let wanted = std::thread::scope(|scope| {
        scope.spawn(|| step(&process, &steps, &is_over));
        until("steps", || (steps.load(Ordering::SeqCst) > 3).then_some(()));
        process.regions().shrink(&Shrink::default()).unwrap();
        assert_eq!(process.regions().gate().view().parked, 1);
        let mut agent = unparks(&socket, agent);
        let begun = Instant::now();
        let mut wanted = 0;
        while begun.elapsed() < Duration::from_secs(4) {
            match agent.hear_now() {
                Some(ToAgent::Want { .. }) => {
                    wanted += 1;
                    agent.say(ToWorker::Deny {
                        why: glake_wire::Denied::TooLarge,
                        retry_after_ms: None,
                        gpus: Vec::new(),
                    });
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        is_over.store(true, Ordering::SeqCst);
        let leaves = Instant::now();
        process.agent().leave();
        assert!(leaves.elapsed() < LONG / 2, "it waits for grants of an agent that it leaves");
        process.regions().refill(&Refill::default()).unwrap();
        wanted
    });
    process.free(block).unwrap();
    assert_eq!(wanted, 0, "times that it was wanted within 4 s, though nobody asked");
}

#[test]
fn unpark_brings_nothing_back_that_the_program_has_shrunk() {
    shrunk_by_the_program(|_, mut agent| {
        agent.say(ToWorker::Unpark);
        agent
    });
}

#[test]
fn a_new_agent_brings_nothing_back_that_the_program_has_shrunk() {
    shrunk_by_the_program(|socket, agent| {
        drop(agent);
        socket.welcome(2)
    });
}
