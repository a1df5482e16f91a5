//! Random programs of three models of which two fit, generated purely from a seed.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use glake_arbiter::Settings;

/// Number of models of a program.
pub(crate) const MODELS: usize = 3;
/// Memory that each refill requests beside the refilled bytes (`lease.growth`), in MiB.
pub(crate) const GROWTH: u64 = 4;
/// Memory beside contexts in MiB: it holds two loaded models with their growth, but not three.
pub(crate) const ROOM: u64 = 2 * (16 + GROWTH);
/// Longest duration without a safe point.
const LONGEST_USE: Duration = Duration::from_millis(200);
/// Time longer than a worker without new memory counts as loading.
const LONG_PAUSE: Duration = Duration::from_millis(6_500);
/// Tolerance for a machine with shared cores.
const BUSY_MACHINE: Duration = Duration::from_secs(15);

/// A random program.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) models: Vec<Model>,
    /// Events of the server, in order.
    pub(crate) incidents: Vec<Incident>,
}

/// A model, and the successive processes that serve it.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) by: By,
    /// Sizes in the agent's file, in MiB; `None`: the file does not name it.
    pub(crate) listed: Option<[u64; 2]>,
    pub(crate) lives: Vec<Life>,
}

/// Origin of a model's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// Started by the agent as it begins to serve.
    Boot,
    /// Started by the agent on request (`glake start`).
    Request,
    /// Started by the test; the process joins with its first pool (`GLAKE_AGENT`).
    Hand,
    /// Started by the test; the process joins first (`glake_join`), and loads within uses.
    HandJoined,
}

/// One process of a model.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    /// Whether `glake start` is called for it although the agent would restart it by itself.
    pub(crate) is_asked_for: bool,
    pub(crate) parts: Vec<Part>,
    /// Whether `glake_join` reports the end of the load; else the first use does.
    pub(crate) joins_when_loaded: bool,
    pub(crate) steps: Vec<Step>,
    pub(crate) end: End,
}

/// One allocation of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) mib: u64,
    /// Time until the next allocation, or until the end of the load.
    pub(crate) pause: Duration,
}

/// Step of a loaded worker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// A use of the given duration, divided by safe points into the given number of steps.
    Use { lasts: Duration, steps: u32 },
    /// Uses until each other model has been served.
    Spin { kind: Spin },
    /// A use that allocates the given number of MiB.
    Grow { mib: u64 },
    /// Frees the memory that it has grown by.
    Shed,
    /// A pause without a use.
    Rest { lasts: Duration },
}

/// Uses without pauses between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spin {
    /// A single use with safe points.
    Steps,
    /// Short successive uses, without safe points.
    Brief,
    /// Short uses of two threads, so that one runs at any time, without safe points.
    Overlapping,
}

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exit,
    /// Leaves the agent first.
    Leave,
    Kill,
    /// Is killed within uses.
    KillBusy(Spin),
    /// Is killed once the given number of parts is loaded.
    KillLoading(usize),
}

/// Event of the server, with its time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incident {
    /// Number of served uses after which it happens.
    pub(crate) after: u64,
    pub(crate) kind: IncidentKind,
}

/// Kind of an event of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IncidentKind {
    /// Kills the agent, and restarts it after the given time.
    AgentKilled { absent: Duration },
    /// Starts another process, which joins with a context and no memory.
    Context,
}

impl Program {
    /// Generates the program of a seed.
    pub(crate) fn of(seed: u64) -> Program {
        let mut rng = Rng::with_seed(seed);
        let mut models: Vec<Model> = (0..MODELS).map(|number| model(&mut rng, number)).collect();
        // One in twenty has a long pause, for it takes longer than the others do; one in four has no safe points. In both all models
        // want memory at once.
        let loads = seed.is_multiple_of(20).then(|| rng.usize(..MODELS));
        if loads.is_some() || seed % 4 == 1 {
            for (number, model) in models.iter_mut().enumerate() {
                model.listed.get_or_insert([12, 4]);
                let life = &mut model.lives[0];
                if let End::KillLoading(_) = life.end {
                    life.end = End::Kill;
                }
                if loads == Some(number) {
                    model.by = By::Hand;
                    life.parts.last_mut().unwrap().pause = LONG_PAUSE;
                    continue;
                }
                let kind = if loads.is_some() {
                    spin(&mut rng)
                } else {
                    [Spin::Brief, Spin::Overlapping][rng.usize(..2)]
                };
                life.steps.insert(0, Step::Spin { kind });
            }
        }
        let mut after = 0;
        let incidents = (0..rng.u64(0..3)).map(|_| {
            after += rng.u64(1..8);
            let absent = Duration::from_millis(rng.u64(0..300));
            let kind =
                if rng.u8(..3) > 0 { IncidentKind::AgentKilled { absent } } else { IncidentKind::Context };
            Incident { after, kind }
        });
        let incidents = incidents.collect();
        Program { seed, models, incidents }
    }

    /// Returns the longest time that a request may wait for memory: the turn and the load of each other model, and the agent's absence.
    pub(crate) fn longest_wait(&self) -> Duration {
        let settings = Settings::default();
        let turn = settings.least_quantum * (2 + settings.longest_turn) / 2 + LONGEST_USE;
        let loads: Duration = self
            .models
            .iter()
            .flat_map(|model| &model.lives)
            .flat_map(|life| &life.parts)
            .map(|part| part.pause)
            .sum();
        let absent: Duration = self
            .incidents
            .iter()
            .map(|incident| match incident.kind {
                IncidentKind::AgentKilled { absent } => absent,
                IncidentKind::Context => Duration::ZERO,
            })
            .sum();
        let others = u32::try_from(self.models.len() - 1).unwrap();
        (turn + settings.resume_after) * others + loads + absent + BUSY_MACHINE
    }
}

fn model(rng: &mut Rng, number: usize) -> Model {
    let name = ["chat", "code", "search"][number];
    let by = match rng.u8(..8) {
        0..2 => By::Boot,
        2..4 => By::Request,
        4..7 => By::Hand,
        _ => By::HandJoined,
    };
    let (weights, kv) = (rng.u64(5..=6) * 2, 4);
    let is_listed = matches!(by, By::Boot | By::Request) || rng.bool();
    let lives = rng.usize(1..=2);
    let mut lives: Vec<Life> = (0..lives).map(|at| life(rng, by, weights + kv, at + 1 == lives)).collect();
    // Of a process that has left, or has died as it loads, `glake start` says that it does not serve.
    for at in 1..lives.len() {
        lives[at].is_asked_for &= !matches!(lives[at - 1].end, End::Leave | End::KillLoading(_));
    }
    Model { name, by, listed: is_listed.then_some([weights, kv]), lives }
}

fn life(rng: &mut Rng, by: By, size: u64, is_last: bool) -> Life {
    // Now and then more than the file says.
    let more = if rng.u8(..3) == 0 { rng.u64(3..=4) * 2 } else { 0 };
    let mut left = size + more;
    let mut parts = Vec::new();
    while left > 0 {
        let mib = if parts.len() == 3 { left } else { (rng.u64(1..=4) * 2).min(left) };
        let pause = Duration::from_millis(if rng.bool() { rng.u64(..40) } else { 0 });
        parts.push(Part { mib, pause });
        left -= mib;
    }
    let mut grown = 0;
    let steps = (0..rng.usize(1..=4)).map(|_| step(rng, &mut grown)).collect();
    let end = match rng.u8(..7) {
        // The agent ends it (`glake stop`), or it would be started again.
        _ if is_last && matches!(by, By::Boot | By::Request) => End::Exit,
        0..2 => End::Exit,
        2 => End::Leave,
        3..5 => End::Kill,
        5 => End::KillBusy(spin(rng)),
        // A start that is killed is followed by another.
        _ if is_last => End::Kill,
        _ => End::KillLoading(rng.usize(1..=parts.len())),
    };
    Life { is_asked_for: rng.bool(), parts, joins_when_loaded: rng.u8(..4) == 0, steps, end }
}

fn step(rng: &mut Rng, grown: &mut u64) -> Step {
    let most = u64::try_from(LONGEST_USE.as_millis()).unwrap();
    match rng.u8(..10) {
        0..3 => Step::Use { lasts: Duration::from_millis(rng.u64(..5)), steps: 1 },
        3 => Step::Use { lasts: Duration::from_millis(rng.u64(..most)), steps: 1 },
        4 => Step::Use { lasts: Duration::from_millis(rng.u64(..most)), steps: rng.u32(2..10) },
        5..8 => Step::Spin { kind: spin(rng) },
        8 if *grown < 4 => {
            *grown += 2;
            Step::Grow { mib: 2 }
        }
        8 => {
            *grown = 0;
            Step::Shed
        }
        _ => Step::Rest { lasts: Duration::from_millis(rng.u64(..100)) },
    }
}

fn spin(rng: &mut Rng) -> Spin {
    [Spin::Steps, Spin::Brief, Spin::Overlapping][rng.usize(..3)]
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {ROOM} MiB beside contexts", self.seed)?;
        for model in &self.models {
            writeln!(f, "  {}, by {:?}, listed {:?}", model.name, model.by, model.listed)?;
            for life in &model.lives {
                let parts: Vec<String> = life
                    .parts
                    .iter()
                    .map(|part| match part.pause.as_millis() {
                        0 => format!("{} MiB", part.mib),
                        pause => format!("{} MiB, {pause} ms", part.mib),
                    })
                    .collect();
                let how = (life.is_asked_for, life.joins_when_loaded);
                writeln!(f, "    loads {} (asked for, joins: {how:?})", parts.join("; "))?;
                life.steps.iter().try_for_each(|step| writeln!(f, "      {step:?}"))?;
                writeln!(f, "      ends: {:?}", life.end)?;
            }
        }
        self.incidents.iter().try_for_each(|incident| writeln!(f, "  {incident:?}"))
    }
}
