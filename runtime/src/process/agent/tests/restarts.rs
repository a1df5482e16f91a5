//! The agent is killed after any frame, and comes back as the same or as another: nothing is lost, and both sides count the same.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;

/// What is to happen, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Idle memory leaves.
    Shrink,
    /// A use wants it back.
    Refill,
    /// The use is parked.
    Park,
    /// And its memory leaves.
    Take,
    /// It is wanted again, by nobody but the library.
    Return,
    Over,
}

/// An agent that wants all of that, whatever is done to it.
struct Driver<'a> {
    socket: &'a Socket,
    agent: Agent,
    epoch: u64,
    phase: Phase,
    held: Holding,
    lease: Bytes,
    wants: bool,
    frames: u64,
    /// After which frame it is killed, and whether another one comes.
    kill: Option<(u64, bool)>,
    is_used: &'a AtomicBool,
    steps: &'a AtomicU64,
    /// Steps of the use when its memory left.
    seen: u64,
}

impl Driver<'_> {
    fn run(&mut self) {
        let begin = Instant::now();
        self.command();
        while self.phase != Phase::Over {
            assert!(begin.elapsed() < LONG, "{:?}: {:?}", self.phase, self.held);
            if let Some(envelope) = self.agent.read() {
                self.frames += 1;
                match self.agent.conversation.receive(envelope.seq, envelope.ack) {
                    Received::New => self.hear(envelope.message),
                    Received::Repeated => {}
                    Received::Gap => panic!("{envelope:?}"),
                }
                self.agent.flush();
                if self.kill.is_some_and(|(frame, _)| frame == self.frames) {
                    self.restart();
                }
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
            self.go_on();
        }
    }

    fn restart(&mut self) {
        let is_another = self.kill.take().is_some_and(|(_, is_another)| is_another);
        let old = std::mem::take(&mut self.agent.conversation);
        self.agent.stream.shutdown(std::net::Shutdown::Both).unwrap();
        self.agent = self.socket.accept();
        let hello = self.agent.hello.clone();
        assert_eq!(hello.epoch, self.epoch);
        if is_another {
            self.epoch += 1;
            self.held = hello.holdings[0].clone();
            (self.lease, self.wants) = (self.held.lease, hello.wants);
        } else {
            self.agent.conversation = old;
            self.agent.conversation.resume(hello.received);
        }
        let (epoch, received) = (self.epoch, self.agent.conversation.received());
        self.agent.welcome(Welcome { epoch, received, worker: 1, wait: false });
        self.agent.flush();
        if is_another {
            self.command();
        }
    }

    /// What this phase asks of the worker, said once.
    fn command(&mut self) {
        match self.phase {
            Phase::Shrink if self.held.evicted.is_zero() => self.agent.shrink(mib(8)),
            Phase::Park => self.agent.say(ToWorker::Park { within_ms: 60_000 }),
            // Whoever is new knows nothing of who is parked.
            Phase::Take if self.held.evicted.is_zero() => {
                self.phase = Phase::Park;
                self.agent.say(ToWorker::Park { within_ms: 60_000 });
            }
            _ => {}
        }
    }

    fn hear(&mut self, message: ToAgent) {
        match message {
            ToAgent::Returned { bytes, .. } => self.lease = self.lease.checked_sub(bytes).unwrap(),
            ToAgent::Want { .. } => self.wants = true,
            ToAgent::Parked => {
                if self.phase == Phase::Park {
                    self.phase = Phase::Take;
                    self.seen = self.steps.load(Ordering::SeqCst);
                    self.agent.shrink(self.lease);
                }
            }
            ToAgent::Failed { what, .. } if what == "park" => self.command(),
            ToAgent::Failed { .. } => panic!("{message:?}"),
            ToAgent::Changed { holdings } | ToAgent::Shrunk { holdings } | ToAgent::Refilled { holdings } => {
                self.held = holdings[0].clone();
            }
            // A new agent has granted what it knew of, and a refill needs more.
            ToAgent::Grow { bytes, .. } => {
                self.lease = self.lease.saturating_add(bytes);
                self.agent.grant(bytes);
            }
            ToAgent::Cancel | ToAgent::Bye | ToAgent::Hello(_) => panic!("{message:?}"),
            ToAgent::Ack | ToAgent::Unknown => {}
        }
    }

    fn go_on(&mut self) {
        if std::mem::take(&mut self.wants) {
            let needed = self.held.evicted.saturating_add(self.held.room);
            let unused = self.lease.saturating_sub(self.held.resident);
            let bytes = needed.saturating_sub(unused);
            self.lease = self.lease.saturating_add(bytes);
            self.agent.grant(bytes);
            self.agent.say(ToWorker::Admit);
        }
        let is_back = self.held.evicted.is_zero();
        match self.phase {
            Phase::Shrink if !is_back => {
                self.phase = Phase::Refill;
                self.is_used.store(true, Ordering::SeqCst);
            }
            Phase::Refill if is_back && self.steps.load(Ordering::SeqCst) > 0 => {
                self.phase = Phase::Park;
                self.command();
            }
            Phase::Take if !is_back => self.phase = Phase::Return,
            Phase::Return if is_back && self.steps.load(Ordering::SeqCst) > self.seen + 1 => {
                self.phase = Phase::Over;
            }
            _ => {}
        }
    }
}

/// How many frames there are.
fn story(kill: Option<(u64, bool)>) -> u64 {
    let socket = Socket::new();
    let process = worker_without_quantum();
    let block = process.block("weights", mib(12));
    let (is_used, steps, is_over) = (AtomicBool::new(false), AtomicU64::new(0), AtomicBool::new(false));
    let frames = std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        let agent = socket.welcome(1);
        joined.join().unwrap().unwrap();
        let held = agent.hello.holdings[0].clone();
        scope.spawn(|| {
            until("the use", || is_used.load(Ordering::SeqCst).then_some(()));
            step(&process, &steps, &is_over);
        });
        let mut driver = Driver {
            socket: &socket,
            agent,
            epoch: 1,
            phase: Phase::Shrink,
            lease: held.lease,
            held,
            wants: false,
            frames: 0,
            kill,
            is_used: &is_used,
            steps: &steps,
            seen: 0,
        };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| driver.run()));
        is_used.store(true, Ordering::SeqCst);
        is_over.store(true, Ordering::SeqCst);
        if let Err(panic) = done {
            process.agent().leave();
            let _ = process.regions().refill(&Refill::default());
            std::panic::resume_unwind(panic);
        }
        assert_eq!(process.lease(), Some(driver.lease), "{kill:?}");
        driver.frames
    });
    assert!(process.has(block, mib(12), 7));
    process.agent().leave();
    process.free(block).unwrap();
    frames
}

#[test]
fn an_agent_that_is_killed_after_any_frame_is_no_loss() {
    let frames = story(None);
    assert!(frames >= 8, "{frames}");
    for frame in 1..frames {
        for is_another in [false, true] {
            story(Some((frame, is_another)));
        }
    }
}
