//! Worker process with numbers instead of memory, which behaves like the library.
//!
//! Lines on stdin control it: `want`, `use`, `end`, `leave`. It prints `joined`, `resident`, `shrunk`, `denied`, `refused`. It has one
//! region on GPU 0, which is evicted at first.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use glake_units::Bytes;
use glake_wire::{
    Activity, ActivityPage, Conversation, Envelope, Frames, Hello, Holding, Peer, Received, ToAgent,
    ToWorker, check_folder, check_server, frame, receive, send,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::meter;

/// Granularity in which a shrink reports returned memory.
const CREDIT: Bytes = Bytes::mib(512);
/// Environment variable with the size of its context, in MiB.
pub(crate) const FLOOR: &str = "GLAKE_TEST_AGENT_FLOOR";

#[derive(Debug)]
pub(crate) struct Puppet {
    name: String,
    path: PathBuf,
    meter: PathBuf,
    size: Bytes,
    floor: Bytes,
    lease: Bytes,
    resident: Bytes,
    activity: Activity,
    page: ActivityPage,
    wants: bool,
    /// Whether an operator requested a refill.
    refills: bool,
    is_parked: bool,
    epoch: u64,
    conversation: Conversation<ToAgent>,
    link: Option<Link>,
    back_off: Duration,
    again_at: Instant,
    /// Whether it runs without stdin, until its folder is gone.
    is_alone: bool,
    /// Number of frames until it kills itself, and whether it handles the last one before.
    left: Option<(u64, bool)>,
}

#[derive(Debug)]
struct Link {
    socket: UnixStream,
    frames: Frames,
    unsent: Vec<u8>,
    /// Position that hello reported; `None` after the welcome.
    told: Option<u64>,
}

impl Puppet {
    pub(crate) fn new(name: &str, path: PathBuf, meter: PathBuf, size: Bytes) -> Self {
        let puppet = Puppet {
            name: name.to_owned(),
            path,
            meter,
            size,
            floor: Bytes::mib(std::env::var(FLOOR).unwrap().parse().unwrap()),
            lease: Bytes::ZERO,
            resident: Bytes::ZERO,
            activity: Activity { begun: 1, parks: true, ..Activity::default() },
            page: ActivityPage::new().unwrap(),
            wants: false,
            refills: false,
            is_parked: false,
            epoch: 0,
            conversation: Conversation::default(),
            link: None,
            back_off: Duration::from_millis(10),
            again_at: Instant::now(),
            left: None,
            is_alone: false,
        };
        puppet.count();
        puppet
    }

    pub(crate) fn dies_at(&mut self, left: Option<(u64, bool)>) {
        self.left = left;
    }

    /// Runs a worker that an agent started.
    pub(crate) fn run_alone(&mut self) {
        self.is_alone = true;
        self.run();
    }

    fn count(&self) {
        meter::write(&self.meter, std::process::id(), self.floor.saturating_add(self.resident));
    }

    fn note(&mut self) {
        self.activity.made[0] = self.resident.get();
        self.page.write(self.activity).unwrap();
    }

    fn holdings(&self) -> Vec<Holding> {
        let evicted = self.size.saturating_sub(self.resident);
        let (lease, resident) = (self.lease, self.resident);
        vec![Holding { gpu: "0".to_owned(), lease, resident, evicted, ..Holding::default() }]
    }

    /// Runs until `leave` or the end of stdin.
    pub(crate) fn run(&mut self) {
        let mut lines = String::new();
        loop {
            if self.link.is_none() && self.again_at <= Instant::now() {
                self.connect();
            }
            self.flush();
            let wait = match self.link {
                Some(_) => Duration::from_secs(60),
                None => self.again_at.saturating_duration_since(Instant::now()),
            };
            let stdin = std::io::stdin();
            let lines_come = if self.is_alone { PollFlags::empty() } else { PollFlags::IN };
            let mut polled = vec![PollFd::new(&stdin, lines_come)];
            let socket = self.link.as_ref().map(|link| link.socket.try_clone().unwrap());
            polled.extend(socket.as_ref().map(|socket| PollFd::new(socket, PollFlags::IN)));
            let wait =
                Timespec { tv_sec: wait.as_secs().try_into().unwrap(), tv_nsec: wait.subsec_nanos().into() };
            poll(&mut polled, Some(&wait)).unwrap();
            let said = !polled[0].revents().is_empty();
            if polled.get(1).is_some_and(|socket| !socket.revents().is_empty()) {
                self.hear_all();
            }
            if said {
                let mut bytes = [0; 256];
                let length = std::io::stdin().read(&mut bytes).unwrap();
                if length == 0 {
                    return;
                }
                lines.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
                while let Some((line, rest)) = lines.split_once('\n') {
                    let (line, rest) = (line.to_owned(), rest.to_owned());
                    if line == "leave" {
                        self.conversation.push(ToAgent::Bye);
                        self.flush();
                        return;
                    }
                    self.obey(&line);
                    lines = rest;
                }
            }
        }
    }

    #[allow(clippy::zombie_processes)] // who started this process ends its child
    fn obey(&mut self, line: &str) {
        match line {
            "want" => self.want(),
            // A new conversation, like that of a reloaded library.
            "anew" => (self.link, self.epoch, self.again_at) = (None, 0, Instant::now()),
            // The worker continues without the agent.
            "bye" => {
                self.conversation.push(ToAgent::Bye);
                self.flush();
                (self.link, self.again_at) = (None, Instant::now() + Duration::from_secs(3600));
            }
            // The worker does not reconnect.
            "sulk" => {
                (self.link, self.again_at) = (None, Instant::now() + Duration::from_secs(3600));
                say("sulking");
            }
            // A child inherits the socket.
            "spawn" => {
                let socket = &self.link.as_ref().unwrap().socket;
                rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).unwrap();
                let mut child = std::process::Command::new("sleep");
                let null = std::process::Stdio::null;
                let child = child.arg("60").stdin(null()).stdout(null()).spawn().unwrap();
                say(&format!("spawned {}", child.id()));
            }
            "use" => self.activity.uses += 1,
            "end" => self.activity.uses -= 1,
            other => panic!("{other}"),
        }
        if self.activity.uses == 0 {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            self.activity.idle_since_ns = u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap();
        }
        self.note();
        if line == "end" {
            say("ended");
        }
    }

    fn want(&mut self) {
        self.wants = true;
        if self.resident == self.size {
            return self.refilled();
        }
        self.conversation.push(ToAgent::Changed { holdings: self.holdings() });
        self.conversation.push(ToAgent::Want { deadline_ms: None });
    }

    fn refilled(&mut self) {
        self.wants = false;
        if std::mem::take(&mut self.refills) || self.lease >= self.size {
            self.conversation.push(ToAgent::Refilled { holdings: self.holdings() });
        }
        say("resident");
    }

    fn connect(&mut self) {
        self.again_at = Instant::now() + self.back_off;
        self.back_off = (self.back_off * 2).min(Duration::from_millis(200));
        if check_folder(&self.path).is_err() {
            let folder = self.path.parent().unwrap();
            if self.is_alone && !folder.exists() {
                std::process::exit(0);
            }
            return;
        }
        let Ok(socket) = UnixStream::connect(&self.path) else { return };
        check_server(&self.path, &socket).unwrap();
        socket.set_nonblocking(true).unwrap();
        let hello = Hello {
            name: self.name.clone(),
            peer: own(),
            ranks: 1,
            epoch: self.epoch,
            received: self.conversation.received(),
            wants: self.wants,
            holdings: self.holdings(),
            ..Hello::default()
        };
        let bytes = frame(&Envelope::unnumbered(ToAgent::Hello(hello))).unwrap();
        self.step();
        // The first bytes carry the page.
        let Ok(sent) = send(&socket, &bytes, Some(self.page.as_fd())) else { return };
        let (unsent, told) = (bytes[sent..].to_vec(), Some(self.conversation.position()));
        self.link = Some(Link { socket, frames: Frames::default(), unsent, told });
    }

    fn flush(&mut self) {
        loop {
            let Some(link) = &mut self.link else { return };
            if !link.unsent.is_empty() {
                match send(&link.socket, &link.unsent, None) {
                    Ok(sent) => drop(link.unsent.drain(..sent)),
                    // Handle the messages that have arrived first.
                    Err(_) => return,
                }
                continue;
            }
            if link.told.is_some() {
                return;
            }
            let Some(bytes) = self.conversation.next(ToAgent::Ack).unwrap() else { return };
            link.unsent = bytes;
            self.step();
        }
    }

    /// Counts a frame that is about to be sent or has arrived.
    fn step(&mut self) {
        if let Some((left, _)) = &mut self.left {
            *left = left.saturating_sub(1);
            if *left == 0 {
                let own = rustix::process::getpid();
                rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
            }
        }
    }

    fn hear_all(&mut self) {
        let mut bytes = vec![0; 64 << 10];
        let over = loop {
            let Some(link) = &mut self.link else { return };
            match receive(&link.socket, &mut bytes) {
                Ok((0, _)) => break true,
                Ok((length, _)) => link.frames.push(&bytes[..length]),
                Err(Errno::AGAIN) => break false,
                Err(_) => break true,
            }
        };
        while let Some(envelope) = self.link.as_mut().and_then(|link| link.frames.take::<ToWorker>().unwrap())
        {
            self.hear(envelope);
        }
        if over {
            self.link = None;
        }
    }

    fn hear(&mut self, Envelope { seq, ack, message, .. }: Envelope<ToWorker>) {
        if self.left.is_some_and(|(_, before)| before) {
            self.step();
        }
        match message {
            ToWorker::Welcome(welcome) => {
                let told = self.link.as_mut().and_then(|link| link.told.take()).unwrap();
                if welcome.epoch == self.epoch {
                    self.conversation.resume(welcome.received);
                } else {
                    self.conversation.restart(told);
                }
                (self.epoch, self.back_off) = (welcome.epoch, Duration::from_millis(10));
                say("joined");
            }
            ToWorker::Refused { why, .. } => {
                say(&format!("refused {why}"));
                self.link = None;
            }
            message => match self.conversation.receive(seq, ack) {
                Received::New => self.do_as_told(message),
                Received::Repeated => {}
                Received::Gap => self.link = None,
            },
        }
        if self.left.is_some_and(|(_, before)| !before) {
            self.step();
        }
    }

    fn do_as_told(&mut self, message: ToWorker) {
        match message {
            ToWorker::Grant { bytes, .. } => {
                self.lease = self.lease.saturating_add(bytes);
                let wanted = if self.wants { self.size } else { self.resident };
                if self.resident < wanted.min(self.lease) {
                    self.resident = wanted.min(self.lease);
                    // Reported before the creation and until the release.
                    self.note();
                    self.count();
                }
                if self.wants && self.resident == self.size {
                    self.refilled();
                }
            }
            ToWorker::Park { .. } => {
                self.is_parked = true;
                self.conversation.push(ToAgent::Parked);
            }
            ToWorker::Unpark => self.is_parked = false,
            ToWorker::Shrink { gpu, bytes, .. } => {
                let mut left = bytes.min(self.lease);
                while !left.is_zero() {
                    let bytes = left.min(CREDIT);
                    self.lease = self.lease.saturating_sub(bytes);
                    self.resident = self.resident.min(self.lease);
                    self.count();
                    self.note();
                    self.conversation.push(ToAgent::Returned { gpu: gpu.clone(), bytes });
                    self.flush();
                    left = left.saturating_sub(bytes);
                }
                self.conversation.push(ToAgent::Shrunk { holdings: self.holdings() });
                say("shrunk");
                // Uses parked at safe points want the memory back.
                if std::mem::take(&mut self.is_parked) && self.activity.uses > 0 {
                    self.want();
                }
            }
            // A temporary denial: like the library, the worker asks again.
            ToWorker::Deny { retry_after_ms: Some(_), .. } => {
                std::thread::sleep(Duration::from_millis(50));
                self.want();
            }
            ToWorker::Deny { why, .. } => {
                self.wants = false;
                say(&format!("denied {why:?}"));
            }
            ToWorker::Refill => {
                self.refills = true;
                self.want();
            }
            _ => {}
        }
    }
}

/// Returns the identity of this process.
pub(crate) fn own() -> Peer {
    let pid = std::process::id();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    Peer { pid, start: fields.split_whitespace().nth(19).unwrap().parse().unwrap() }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{text}").unwrap();
    out.flush().unwrap();
}
