//! Configuration keys of copies over several links.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::knob::{SWITCH, knobs};

knobs! {
    /// Use of other GPUs' links for copies between the host and a GPU.
    Transfer as transfer {
        [transfer]
        /// Start of copies over other GPUs' links: on request (false), with the process (true), always, or never.
        ///
        /// False: `glake_multi_path` (`glake.multi_path()`) starts them. True: from the start. Both stay off if several ranks run on the
        /// machine, because the links belong to the other ranks' copies; `"always"` starts them in spite of that, for ranks that copy in
        /// turns. `"never"`: requests are refused; for machines where another program's GPUs are visible. A relay costs a context on its
        /// GPU except while everything is evicted; `glake_copy_stats_json` tells its memory. `GLAKE_MULTI_PATH` chooses between false and
        /// true, and changes neither `"always"` nor `"never"`.
        multi_path: MultiPath = MultiPath::OnRequest, "true, false, \"always\" or \"never\"";
        /// Number of this program's processes on this machine.
        ///
        /// From 2 on, the links belong to the copies of the other ranks, and requested relays stay off. 0 means 1. If absent, launchers
        /// state it: `LOCAL_WORLD_SIZE`, `OMPI_COMM_WORLD_LOCAL_SIZE`, `MPI_LOCALNRANKS`, `MV2_COMM_WORLD_LOCAL_SIZE`, `LOCAL_SIZE`; Slurm
        /// for this node of the step, `SLURM_STEP_TASKS_PER_NODE`, or of the job if `SLURM_PROCID` is set. The largest number holds. Set it
        /// for other launchers.
        local_ranks: Option<u32> = None, "a whole number", absent "what its launcher says, else 1" as 1;
        /// GPUs that never serve as relays, by index among the visible ones or by PCI address.
        ///
        /// Use it for GPUs of other programs. GPUs hidden by `CUDA_VISIBLE_DEVICES` are never relays.
        exclude: Vec<Gpu> = Vec::new(), "a list of GPUs, by index or PCI address: [2, \"0000:3b:00.0\"]",
            if |gpus| gpus.iter().all(Gpu::is_valid);
        /// Threads that copy pageable memory to and from pinned slots.
        ///
        /// 0: none, so that the driver copies pageable memory. More threads than cores do not help. Lower it if the program needs its cores
        /// during copies.
        pageable_threads: Option<u32> = None, "a whole number of threads, at most 256",
            if |threads| threads.is_none_or(|threads| threads <= 256), absent "half of the cores, 8 at most" as 8;
        /// Whether source and destination of every synchronous copy are compared, on any path.
        ///
        /// Bytes that differ are copied again. Use it to find out whether a machine corrupts bytes; it takes longer than the copy itself,
        /// on one link.
        verify: bool = false, SWITCH;
        /// Whether copies captured into a CUDA graph are split over the links, as kernel nodes on the relays.
        ///
        /// False: a captured copy is one memcpy node, as without GLake. Set it to true only if no such graph is launched from a GPU or is
        /// the body of a conditional node: these do not allow nodes of other GPUs, and the later use of a graph is unknown during capture.
        graphs: bool = false, SWITCH;
        /// Whether copies may use the links of GPUs that the program itself uses.
        ///
        /// False: only GPUs without a primary context become relays. Set it to true if a program uses several GPUs and copies with one of
        /// them while the others' links are idle.
        shared_gpus: bool = false, SWITCH;
        /// Folder of calibrations (`glake topo --calibrate`).
        ///
        /// Empty: none, so that rates are assumed and refined by copies. Set it if the home folder is not kept or is shared with another
        /// machine. If absent, the cache folder is `XDG_CACHE_HOME`, else `~/.cache`, else none.
        calibrations: Option<PathBuf> = None, "the path of a folder, or \"\"",
            absent "glake/paths in the user's cache folder" as "";
    }
}

/// Start of copies over other GPUs' links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Spelled", into = "Spelled")]
pub enum MultiPath {
    /// On request, unless several ranks run on the machine.
    #[default]
    OnRequest,
    /// With the process, unless several ranks run on the machine.
    FromStart,
    /// With the process, whether or not several ranks run on the machine.
    Always,
    /// Never; requests are refused.
    Never,
}

/// Name of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Gpu {
    /// Index among the visible GPUs, from 0.
    Index(u32),
    /// PCI address: `0000:3b:00.0`, `3b:00.0`.
    Pci(String),
}

/// Representation in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Spelled {
    Switch(bool),
    Text(String),
}

impl Transfer {
    /// Returns whether relays start with the process.
    pub fn starts_relays(&self) -> bool {
        self.multi_path != MultiPath::OnRequest && self.allows_relays()
    }

    /// Returns whether relays may start on request.
    pub fn allows_relays(&self) -> bool {
        match self.multi_path {
            MultiPath::OnRequest | MultiPath::FromStart => self.local_ranks.is_none_or(|ranks| ranks < 2),
            MultiPath::Always => true,
            MultiPath::Never => false,
        }
    }
}

impl Gpu {
    /// Returns whether this names the given GPU. PCI addresses are compared as numbers; an omitted domain is 0.
    pub fn is(&self, index: u32, pci: Option<&str>) -> bool {
        match self {
            Gpu::Index(named) => *named == index,
            Gpu::Pci(named) => {
                pci_numbers(named).is_some_and(|named| pci.and_then(pci_numbers) == Some(named))
            }
        }
    }

    /// Returns whether the name is well-formed.
    pub(super) fn is_valid(&self) -> bool {
        match self {
            Gpu::Index(_) => true,
            Gpu::Pci(text) => pci_numbers(text).is_some(),
        }
    }
}

/// Parses domain, bus, device and function of a PCI address.
fn pci_numbers(text: &str) -> Option<[u32; 4]> {
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

impl TryFrom<Spelled> for MultiPath {
    type Error = &'static str;

    fn try_from(spelled: Spelled) -> Result<Self, &'static str> {
        match spelled {
            Spelled::Switch(true) => Ok(MultiPath::FromStart),
            Spelled::Switch(false) => Ok(MultiPath::OnRequest),
            Spelled::Text(text) if text == "always" => Ok(MultiPath::Always),
            Spelled::Text(text) if text == "never" => Ok(MultiPath::Never),
            Spelled::Text(_) => Err("true, false, \"always\" or \"never\""),
        }
    }
}

impl From<MultiPath> for Spelled {
    fn from(multi_path: MultiPath) -> Spelled {
        match multi_path {
            MultiPath::FromStart => Spelled::Switch(true),
            MultiPath::OnRequest => Spelled::Switch(false),
            MultiPath::Always => Spelled::Text("always".to_owned()),
            MultiPath::Never => Spelled::Text("never".to_owned()),
        }
    }
}

impl fmt::Display for MultiPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MultiPath::FromStart => "true",
            MultiPath::OnRequest => "false",
            MultiPath::Always => "\"always\"",
            MultiPath::Never => "\"never\"",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relays_stay_off_if_ranks_share_the_links() {
        for (multi_path, ranks, starts, allows) in [
            (MultiPath::OnRequest, None, false, true),
            (MultiPath::OnRequest, Some(8), false, false),
            (MultiPath::FromStart, None, true, true),
            (MultiPath::FromStart, Some(0), true, true),
            (MultiPath::FromStart, Some(1), true, true),
            (MultiPath::FromStart, Some(2), false, false),
            (MultiPath::Always, None, true, true),
            (MultiPath::Always, Some(2), true, true),
            (MultiPath::Never, None, false, false),
            (MultiPath::Never, Some(2), false, false),
        ] {
            let transfer = Transfer { multi_path, local_ranks: ranks, ..Transfer::default() };
            assert_eq!(
                (transfer.starts_relays(), transfer.allows_relays()),
                (starts, allows),
                "{transfer:?}"
            );
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
        for multi_path in [MultiPath::OnRequest, MultiPath::FromStart, MultiPath::Always, MultiPath::Never] {
            let transfer = Transfer { exclude: exclude.clone(), multi_path, ..Transfer::default() };
            let text = toml::to_string(&transfer).unwrap();
            assert_eq!(toml::from_str::<Transfer>(&text).unwrap(), transfer, "{text}");
            assert!(text.contains(&format!("multi_path = {multi_path}")), "{text}");
        }
    }
}
