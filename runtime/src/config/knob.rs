//! Every key that can be set, and what its value may be.

use glake_units::Bytes;

use super::{Config, Gpu, Pool};

/// CUDA's granularity: what can be mapped is a multiple of it.
const GRANULARITY: Bytes = Bytes::mib(2);
/// What a relay gives of its memory at most.
const MOST_SLOTS: Bytes = Bytes::mib(64);

/// A key of the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// Its name, from the table on: `pool.extent`.
    pub key: &'static str,
    /// What its value may be, in words.
    pub allowed: &'static str,
    /// What its type does not say; given a configuration in which only this key was set.
    holds: fn(&Config) -> bool,
}

/// All keys, table by table.
pub const KNOBS: &[Knob] = &[
    Knob {
        key: "pool.extent",
        allowed: "a multiple of 2MiB above 0, such as \"16MiB\"",
        holds: |c| is_mappable(c.pool.extent),
    },
    Knob {
        key: "pool.extent_near_limit",
        allowed: "a multiple of 2MiB above 0, such as \"2MiB\"",
        holds: |c| is_mappable(c.pool.extent_near_limit),
    },
    Knob {
        key: "pool.slab",
        allowed: "a multiple of 2MiB above 0, such as \"2MiB\"",
        holds: |c| is_mappable(c.pool.slab),
    },
    Knob { key: "pool.alias", allowed: "true or false", holds: |_| true },
    Knob { key: "pool.fragment_limit", allowed: SIZE, holds: |_| true },
    Knob {
        key: "pool.reuse_limit",
        allowed: "a number from 0 on, or inf",
        holds: |c| c.pool.reuse_limit >= 0.0,
    },
    Knob { key: "pool.defragment_level", allowed: "0 or 1", holds: |_| true },
    Knob { key: "pool.auto_gc_limit", allowed: SIZE, holds: |_| true },
    Knob {
        key: "pool.max_mappings",
        allowed: "a whole number from 1 on",
        holds: |c| c.pool.max_mappings >= 1,
    },
    Knob {
        key: "pool.memory_fraction",
        allowed: "a number from 0 to 1",
        holds: |Config { pool: Pool { memory_fraction, .. }, .. }| (0.0..=1.0).contains(memory_fraction),
    },
    Knob { key: "pool.limit", allowed: SIZE, holds: |_| true },
    Knob { key: "pool.exportable", allowed: "true or false", holds: |_| true },
    Knob { key: "pool.peer_access", allowed: "true or false", holds: |_| true },
    Knob { key: "pool.borrow", allowed: "\"off\", \"completed\" or \"wait\"", holds: |_| true },
    Knob { key: "pool.wait.oldest_first", allowed: "true or false", holds: |_| true },
    Knob { key: "pool.wait.split", allowed: "true or false", holds: |_| true },
    Knob { key: "pool.wait.stitch", allowed: "true or false", holds: |_| true },
    Knob { key: "pool.wait.max_excess", allowed: SIZE, holds: |_| true },
    Knob { key: "pool.wait.epoch_interval_us", allowed: "a whole number of microseconds", holds: |_| true },
    Knob { key: "transfer.relays", allowed: "\"auto\", true or false", holds: |_| true },
    Knob { key: "transfer.multi_path", allowed: "true or false", holds: |_| true },
    Knob { key: "transfer.local_ranks", allowed: "a whole number", holds: |_| true },
    Knob {
        key: "transfer.exclude",
        allowed: "a list of GPUs, by index or PCI address: [2, \"0000:3b:00.0\"]",
        holds: |c| c.transfer.exclude.iter().all(Gpu::is_valid),
    },
    Knob { key: "transfer.break_even", allowed: SIZE, holds: |_| true },
    Knob {
        key: "transfer.slots",
        allowed: "a multiple of 2MiB, at most \"64MiB\"",
        holds: |c| c.transfer.slots.is_aligned(GRANULARITY) && c.transfer.slots <= MOST_SLOTS,
    },
    Knob {
        key: "transfer.streams",
        allowed: "a whole number from 1 to 1024",
        holds: |c| (1..=1024).contains(&c.transfer.streams),
    },
    Knob {
        key: "transfer.pageable_threads",
        allowed: "a whole number of threads, at most 256",
        holds: |c| c.transfer.pageable_threads.is_none_or(|threads| threads <= 256),
    },
    Knob { key: "transfer.verify", allowed: "true or false", holds: |_| true },
    Knob { key: "transfer.graphs", allowed: "true or false", holds: |_| true },
    Knob { key: "transfer.shared_gpus", allowed: "true or false", holds: |_| true },
    Knob { key: "transfer.calibrations", allowed: "the path of a folder, or \"\"", holds: |_| true },
    Knob { key: "tiers.host_budget", allowed: SIZE, holds: |_| true },
    Knob { key: "tiers.host_prepare", allowed: SIZE, holds: |_| true },
    Knob { key: "tiers.host_arena", allowed: SIZE, holds: |_| true },
    Knob { key: "tiers.host_spare", allowed: SIZE, holds: |_| true },
    Knob { key: "tiers.files", allowed: "the path of a folder", holds: |_| true },
    Knob { key: "tiers.verify", allowed: "true or false", holds: |_| true },
    Knob {
        key: "tiers.extent",
        allowed: "a multiple of 2MiB above 0, such as \"128MiB\"",
        holds: |c| is_mappable(c.tiers.extent),
    },
    Knob { key: "tiers.drain_timeout_ms", allowed: "a whole number of milliseconds", holds: |_| true },
    Knob { key: "tiers.suspend_relays", allowed: "true or false", holds: |_| true },
    Knob {
        key: "device.choice",
        allowed: "\"auto\", \"cuda\", \"sim\", \"sim:TOPOLOGY\" or \"sim:TOPOLOGY@/FOLDER\"",
        holds: |_| true,
    },
    Knob {
        key: "log.filter",
        allowed: "a tracing filter, such as \"info\" or \"warn,glake::transfer=debug\"",
        holds: |c| c.log.is_valid(),
    },
];

/// Keys of before, and what they are called now.
const MOVED: &[(&str, &str)] = &[("tiers.relays_rest", "tiers.suspend_relays")];

const SIZE: &str = "a size: bytes, or a number and a unit such as \"512MiB\" or \"32GiB\"";

impl Knob {
    /// The knob of a key.
    pub fn of(key: &str) -> Option<&'static Knob> {
        KNOBS.iter().find(|knob| knob.key == key)
    }

    /// Whether a configuration in which only this key was set is allowed.
    pub(super) fn holds_in(&self, config: &Config) -> bool {
        (self.holds)(config)
    }
}

/// What a key of before is called now.
pub(super) fn moved(key: &str) -> Option<&'static str> {
    MOVED.iter().find(|(before, _)| *before == key).map(|(_, now)| *now)
}

/// The keys that are nearest to one that does not exist: those of its table, or all tables' names.
pub(super) fn allowed_beside(key: &str) -> Vec<&'static str> {
    let table = key.rsplit_once('.').map_or("", |(table, _)| table);
    let in_table: Vec<_> = KNOBS
        .iter()
        .map(|knob| knob.key)
        .filter(|known| known.rsplit_once('.').is_some_and(|(of, _)| of == table))
        .collect();
    if in_table.is_empty() { KNOBS.iter().map(|knob| knob.key).collect() } else { in_table }
}

fn is_mappable(size: Bytes) -> bool {
    !size.is_zero() && size.is_aligned(GRANULARITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed() {
        let config = Config::default();
        for knob in KNOBS {
            assert!(knob.holds_in(&config), "{}", knob.key);
        }
    }

    #[test]
    fn keys_of_before_are_keys_no_more_and_lead_to_some() {
        for (before, now) in MOVED {
            assert!(Knob::of(before).is_none() && Knob::of(now).is_some(), "{before}");
        }
    }
}
