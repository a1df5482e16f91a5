//! Clocks of a simulated device.

use std::time::Instant;

/// Clock by which work completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// Time advances only when stepped or when a caller waits: for tests. Equal calls yield equal times.
    #[default]
    Virtual,
    /// Work completes in real time: for demonstrations.
    Wall,
}

/// A running clock. Times are nanoseconds since the simulator was created.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ticking {
    Virtual,
    Wall(Instant),
}

impl Ticking {
    pub(super) fn start(clock: Clock) -> Self {
        match clock {
            Clock::Virtual => Ticking::Virtual,
            Clock::Wall => Ticking::Wall(Instant::now()),
        }
    }

    /// Returns the current time; `None` for a virtual clock, which only stepping advances.
    pub(super) fn read(self) -> Option<u64> {
        match self {
            Ticking::Virtual => None,
            Ticking::Wall(since) => Some(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)),
        }
    }
}
