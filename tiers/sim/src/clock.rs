//! What time is to a simulated device.

use std::time::Instant;

/// By which clock work completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// Time stands still until it is stepped, or until somebody waits: for tests. Equal calls give equal times.
    #[default]
    Virtual,
    /// Work completes in real time: for demonstrations.
    Wall,
}

/// A running clock. Times are nanoseconds since the simulator was made.
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

    /// What the clock shows; `None` where only stepping moves it.
    pub(super) fn read(self) -> Option<u64> {
        match self {
            Ticking::Virtual => None,
            Ticking::Wall(since) => Some(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)),
        }
    }
}
