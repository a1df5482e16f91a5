//! The knobs of copies over every link.

use std::fmt;
use std::path::PathBuf;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// How copies between the host and a GPU use the links of the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transfer {
    /// Whether other GPUs are relays of a copy.
    pub relays: Relays,
    /// Whether relays are asked for from the start (`GLAKE_MULTI_PATH`); later `glake_multi_path` asks.
    ///
    /// Default false: a relay costs a context on its GPU, which a program that copies little need not pay.
    pub multi_path: bool,
    /// How many processes of the program run on this machine, as its launcher says (`LOCAL_WORLD_SIZE` and its kin).
    ///
    /// Absent: nobody says, so one. From 2 on the links belong to the other ranks' own copies, and relays that are merely
    /// asked for stay off. 0 says the same as 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_ranks: Option<u32>,
    /// GPUs that are no relays, by index among the visible ones or by PCI address.
    ///
    /// Default none: every visible GPU is one. GPUs that `CUDA_VISIBLE_DEVICES` hides are none in any case.
    pub exclude: Vec<Gpu>,
    /// The least size that goes over several links.
    ///
    /// Absent: what the path graph says, calibrated or conservative. 0: every copy; infinity (any size above the device's
    /// memory): none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub break_even: Option<Bytes>,
    /// Memory on each relay through which copies of GPU memory go that is not the pool's (that of `cudaMalloc`); a multiple of 2 MiB,
    /// CUDA's granularity.
    ///
    /// Default 64 MiB, which is the most: two streams' copies at a time. 0: such copies take their GPU's own link alone.
    pub slots: Bytes,
    /// How many streams of the program can have copies over several links at a time.
    ///
    /// Default 8. Each has streams and events on each relay, made when they are wanted. A further stream's copies take one
    /// link until another's are done. 0 is refused, and so is what no device bears.
    pub streams: u32,
    /// Threads that move pageable memory to and from pinned slots.
    ///
    /// Absent: by the cores that the process may use. 0: none, so that pageable memory is copied by the driver; more than
    /// there are cores bring nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pageable_threads: Option<u32>,
    /// Whether both sides of every copy that its call waits for are compared, whatever way it went; what differs is copied again.
    ///
    /// Default false; it takes as long as the copy itself, over one link, and more.
    pub verify: bool,
    /// Whether copies that a stream records into a graph are split over the links, as kernel nodes on the relays.
    ///
    /// Default false: they are one memcpy node each. A graph with nodes of other GPUs cannot be launched from a GPU, nor be the body
    /// of a conditional node, and what a capture will be used for cannot be known while it is recorded.
    pub graphs: bool,
    /// Whether links of GPUs that the program uses too are lent to copies; else relays are only GPUs whose primary context nobody
    /// has.
    ///
    /// Default false.
    pub shared_gpus: bool,
    /// The folder that calibrations are kept in (`glake topo --calibrate`).
    ///
    /// Absent: `glake/paths` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`), or none where there is none.
    /// Empty: none, so that paths are assumed and refined by copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibrations: Option<PathBuf>,
}

/// Whether other GPUs are relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Spelled", into = "Spelled")]
pub enum Relays {
    /// When they are asked for, unless several ranks run on the machine.
    #[default]
    Auto,
    /// From the start, whoever else runs.
    On,
    /// Never.
    Off,
}

/// A GPU by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Gpu {
    /// Among the visible ones, counted from 0.
    Index(u32),
    /// By its place: `0000:3b:00.0`, `3b:00.0`.
    Pci(String),
}

/// As a file has it.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Spelled {
    Switch(bool),
    Text(String),
}

impl Transfer {
    /// Whether relays start with the process.
    pub fn starts_relays(&self) -> bool {
        self.relays == Relays::On || self.multi_path && self.allows_relays()
    }

    /// Whether relays may start when somebody asks for them.
    pub fn allows_relays(&self) -> bool {
        match self.relays {
            Relays::Auto => self.local_ranks.is_none_or(|ranks| ranks < 2),
            Relays::On => true,
            Relays::Off => false,
        }
    }
}

impl Gpu {
    /// Whether it is this one. PCI addresses are compared as numbers; a domain that is left out is 0.
    pub fn is(&self, index: u32, pci: Option<&str>) -> bool {
        match self {
            Gpu::Index(named) => *named == index,
            Gpu::Pci(named) => place(named).is_some_and(|named| pci.and_then(place) == Some(named)),
        }
    }

    /// Whether it can name a GPU at all.
    pub(super) fn is_valid(&self) -> bool {
        match self {
            Gpu::Index(_) => true,
            Gpu::Pci(text) => place(text).is_some(),
        }
    }
}

/// Domain, bus, device and function of a PCI address.
fn place(text: &str) -> Option<[u32; 4]> {
    let number = |part: &str| u32::from_str_radix(part, 16).ok();
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    Some([number(domain)?, number(bus)?, number(device)?, number(function)?])
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Gpu::Index(index) => write!(f, "{index}"),
            Gpu::Pci(text) => f.write_str(text),
        }
    }
}

impl Default for Transfer {
    fn default() -> Self {
        Transfer {
            relays: Relays::Auto,
            multi_path: false,
            local_ranks: None,
            exclude: Vec::new(),
            break_even: None,
            slots: Bytes::mib(64),
            streams: 8,
            pageable_threads: None,
            verify: false,
            graphs: false,
            shared_gpus: false,
            calibrations: None,
        }
    }
}

impl TryFrom<Spelled> for Relays {
    type Error = &'static str;

    fn try_from(spelled: Spelled) -> Result<Self, &'static str> {
        match spelled {
            Spelled::Switch(true) => Ok(Relays::On),
            Spelled::Switch(false) => Ok(Relays::Off),
            Spelled::Text(text) if text == "auto" => Ok(Relays::Auto),
            Spelled::Text(_) => Err("\"auto\", true or false"),
        }
    }
}

impl From<Relays> for Spelled {
    fn from(relays: Relays) -> Spelled {
        match relays {
            Relays::Auto => Spelled::Text("auto".to_owned()),
            Relays::On => Spelled::Switch(true),
            Relays::Off => Spelled::Switch(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(relays: Relays, multi_path: bool, local_ranks: Option<u32>) -> Transfer {
        Transfer { relays, multi_path, local_ranks, ..Transfer::default() }
    }

    #[test]
    fn relays_are_asked_for_and_not_where_ranks_share_the_links() {
        for (asked, ranks, starts, allows) in [
            (false, None, false, true),
            (true, None, true, true),
            (true, Some(1), true, true),
            (true, Some(0), true, true),
            (true, Some(2), false, false),
            (false, Some(8), false, false),
        ] {
            let auto = transfer(Relays::Auto, asked, ranks);
            assert_eq!((auto.starts_relays(), auto.allows_relays()), (starts, allows), "{auto:?}");
            let on = transfer(Relays::On, asked, ranks);
            assert!(on.starts_relays() && on.allows_relays());
            let off = transfer(Relays::Off, asked, ranks);
            assert!(!off.starts_relays() && !off.allows_relays());
        }
    }

    #[test]
    fn gpus_are_named_by_index_or_address() {
        let pci = Some("0000:3B:00.0");
        assert!(Gpu::Index(1).is(1, pci) && !Gpu::Index(1).is(2, pci));
        for (named, same) in [
            ("0000:3b:00.0", true),
            ("3b:00.0", true),
            ("00000000:3B:00.0", true),
            ("0000:3c:00.0", false),
            ("b:00.0", false),
            ("0001:3b:00.0", false),
            ("3b:00", false),
        ] {
            assert_eq!(Gpu::Pci(named.to_owned()).is(0, pci), same, "{named}");
        }
        assert!(!Gpu::Pci("3b:00.0".to_owned()).is(0, None));
        assert!(!Gpu::Pci("nothing".to_owned()).is(0, Some("nothing")));
    }

    #[test]
    fn reads_back_what_it_writes() {
        let exclude = vec![Gpu::Index(2), Gpu::Pci("3b:00.0".to_owned())];
        let transfer = Transfer { exclude, relays: Relays::Off, ..Transfer::default() };
        let text = toml::to_string(&transfer).unwrap();
        assert_eq!(toml::from_str::<Transfer>(&text).unwrap(), transfer, "{text}");
    }
}
