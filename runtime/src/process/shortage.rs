//! Out-of-memory errors: the state of the memory, in torch's words or, without torch, without its name.

use std::fmt;

use glake_device::DeviceId;
use glake_tiers::LeaseShort;
use glake_units::Bytes;
use glake_wire::{Denied, Holder};

/// State of the memory when a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Device of the request.
    pub device: DeviceId,
    /// Size of the request.
    pub wanted: Bytes,
    /// Total memory of the device.
    pub total: Bytes,
    /// Memory of the device that no process uses.
    pub free: Bytes,
    /// Maximum bytes that the pool may reserve.
    pub limit: Bytes,
    /// Bytes that the pool has reserved.
    pub reserved: Bytes,
    /// Reserved bytes in live blocks.
    pub allocated: Bytes,
    /// Free bytes in whole extents, which could be stitched.
    pub stitchable: Bytes,
    /// Freed bytes that unfinished work of streams still uses.
    pub pending: Bytes,
    /// Whether a stream capture was open, which forbids waiting for pending bytes.
    pub in_capture: bool,
    /// State of the device's lease, if the lease caused the failure.
    pub lease: Option<LeaseShort>,
    /// Grantor of the lease.
    pub grantor: Grantor,
}

/// Grantor of a lease, and its last answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Grantor {
    /// The program set the lease itself.
    #[default]
    Program,
    /// The node agent. None: it did not answer in time.
    Agent(Option<Denial>),
}

/// Denial of a request for memory by the node agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Denial {
    /// Reason of the denial. None: the agent is of a release that does not say.
    pub why: Option<Denied>,
    /// Memory of the GPU for all workers. 0: unknown.
    pub budget: Bytes,
    /// Workers with a lease on the GPU, the largest lease first.
    pub holders: Vec<Holder>,
}

/// The reason, the occupancy of the GPU, and what to change.
impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Denial { why, budget, holders } = self;
        let largest = holders.first().map_or("WORKER", |holder| &holder.name);
        f.write_str(match why {
            Some(Denied::TooLarge) => "all that the other workers could give is not enough",
            Some(Denied::Deadline) => {
                "not enough came within its time, because the uses of other workers did not stop"
            }
            Some(Denied::Incomplete) => "not all ranks of this worker have joined",
            Some(Denied::Lost) => "the driver does not restore this process",
            None => "it gave no reason",
        })?;
        if !budget.is_zero() {
            write!(f, "; this GPU has {} for its workers", Amount(*budget))?;
        }
        for (at, Holder { name, lease }) in holders.iter().enumerate() {
            let before = if at > 0 {
                ","
            } else if budget.is_zero() {
                "; this GPU is leased to"
            } else {
                ", leased to"
            };
            write!(f, "{before} {} ({})", name, Amount(*lease))?;
        }
        f.write_str("; ")?;
        match why {
            Some(Denied::Deadline) => write!(
                f,
                "let a worker give memory (glake shrink {}), or wait longer (lease.grow_timeout_ms, lease.refill_timeout_ms)",
                largest
            ),
            Some(Denied::Incomplete) => f.write_str("look at the other ranks (glake ps)"),
            Some(Denied::Lost) => f.write_str("end it, and start it again"),
            Some(Denied::TooLarge) | None => f.write_str(
                "raise [node] budget in the agent's file, end a worker, or move one to another GPU",
            ),
        }
    }
}

impl std::error::Error for Shortage {}

/// Begins with torch's text, because programs search for "CUDA out of memory".
impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tell(f, "Of the reserved memory", ["allocated", "unallocated"])
    }
}

/// Formatter in torch's words: the first sentences are torch's own, because programs search for them.
#[derive(Clone, Copy, Debug)]
pub struct InTorchWords<'a>(pub &'a Shortage);

impl fmt::Display for InTorchWords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = ["allocated by PyTorch", "reserved by PyTorch but unallocated"];
        self.0.tell(f, "Of the allocated memory", words)
    }
}

impl Shortage {
    /// Writes the text. `of_all` begins the sentence about used and unused memory; `words` names the two.
    fn tell(&self, f: &mut fmt::Formatter<'_>, of_all: &str, words: [&str; 2]) -> fmt::Result {
        let unused = self.reserved.saturating_sub(self.allocated);
        write!(
            f,
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free. ",
            Amount(self.wanted),
            self.device.0,
            Amount(self.total),
            Amount(self.free)
        )?;
        if self.limit < self.total {
            write!(f, "{} allowed; ", Amount(self.limit))?;
        }
        let [live, free] = words;
        write!(f, "{of_all} {} is {live}, and {} is {free}. ", Amount(self.allocated), Amount(unused))?;
        if self.wanted > self.total {
            return f.write_str(
                "The whole GPU is smaller than that, so nothing was given back for it: allocate less.",
            );
        }
        let waited = match self.in_capture {
            true => "but pending work cannot be waited for while a stream capture is open",
            false => "and waited for all pending work first",
        };
        write!(
            f,
            "GLake gave back what it could {waited}: of the unallocated memory {} is in whole free extents that can be \
             stitched, {} is pending on streams. ",
            Amount(self.stitchable),
            Amount(self.pending)
        )?;
        if let Some(LeaseShort { leased, made, wanted, waited, .. }) = self.lease {
            write!(f, "The lease is what stops it: {} of {} are made. ", Amount(made), Amount(leased))?;
            let wanted = Amount(wanted);
            return match &self.grantor {
                Grantor::Program => write!(
                    f,
                    "{wanted} more were not granted within {waited:.1?}: raise it with glake.lease.grant, or allocate less."
                ),
                Grantor::Agent(None) => write!(
                    f,
                    "The node agent was asked for {wanted} more and has not answered within {waited:.1?}: look whether it runs (glake \
                     ps), raise lease.grow_timeout_ms, or allocate less."
                ),
                Grantor::Agent(Some(denial)) => write!(
                    f,
                    "The node agent was asked for {wanted} more and denied it after {waited:.1?}: {denial}, or allocate less."
                ),
            };
        }
        if self.in_capture {
            return f.write_str("End the capture, or free memory before it begins.");
        }
        let room = self.limit.saturating_sub(self.reserved);
        f.write_str(if self.limit < self.total && room < self.wanted && self.free >= self.wanted {
            "The limit is what stops it: raise it with set_per_process_memory_fraction or pool.limit, or allocate less."
        } else if self.free < self.wanted && self.total.saturating_sub(self.free) > self.reserved.saturating_add(SLACK) {
            "Something else holds memory of this GPU too: end that, or allocate less."
        } else {
            "Live memory alone does not leave room: free some, or allocate less."
        })
    }
}

/// Approximate memory of a CUDA context.
const SLACK: Bytes = Bytes::gib(1);

/// An amount in torch's format.
struct Amount(Bytes);

impl fmt::Display for Amount {
    #[allow(clippy::cast_precision_loss)] // two decimals, for people
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: u64 = 1 << 10;
        let bytes = self.0.get();
        let scaled = |unit: u64| bytes as f64 / unit as f64;
        match bytes {
            0..=KIB => write!(f, "{bytes} bytes"),
            _ if bytes <= KIB.pow(2) => write!(f, "{:.2} KiB", scaled(KIB)),
            _ if bytes <= KIB.pow(3) => write!(f, "{:.2} MiB", scaled(KIB.pow(2))),
            _ => write!(f, "{:.2} GiB", scaled(KIB.pow(3))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shortage() -> Shortage {
        Shortage {
            device: DeviceId(0),
            wanted: Bytes::gib(2),
            total: Bytes::gib(140),
            free: Bytes::mib(1536),
            limit: Bytes::gib(140),
            reserved: Bytes::mib(138 << 10 | 512),
            allocated: Bytes::gib(137),
            stitchable: Bytes::mib(512),
            pending: Bytes::ZERO,
            in_capture: false,
            lease: None,
            grantor: Grantor::Program,
        }
    }

    #[test]
    fn names_torch_only_in_its_words() {
        let text = shortage().to_string();
        assert!(
            text.contains(
                "is free. Of the reserved memory 137.00 GiB is allocated, and 1.50 GiB is unallocated. GLake "
            ),
            "{text}"
        );
        assert!(!text.contains("PyTorch"), "{text}");
    }

    #[test]
    fn begins_with_torch_s_words() {
        let text = InTorchWords(&shortage()).to_string();
        assert!(
            text.starts_with(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 140.00 GiB of which \
                 1.50 GiB is free. Of the allocated memory 137.00 GiB is allocated by PyTorch, and 1.50 GiB is \
                 reserved by PyTorch but unallocated. GLake "
            ),
            "{text}"
        );
        assert!(
            text.contains("512.00 MiB is in whole free extents") && text.ends_with("allocate less."),
            "{text}"
        );
    }

    #[test]
    fn says_what_stands_in_the_way() {
        let limited = Shortage { limit: Bytes::gib(138), free: Bytes::gib(3), ..shortage() };
        let text = limited.to_string();
        assert!(text.contains("is free. 138.00 GiB allowed; Of the") && text.contains("raise it"), "{text}");
        let waited = std::time::Duration::from_secs(2);
        let short = LeaseShort {
            leased: Bytes::gib(8),
            made: Bytes::gib(7),
            wanted: Bytes::mib(2048),
            waited,
            denied: true,
        };
        let text = Shortage { lease: Some(short), ..shortage() }.to_string();
        for part in ["7.00 GiB of 8.00 GiB are made", "2.00 GiB more", "2.0s", "glake.lease.grant, or"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let holder = |name: &str, gib| Holder { name: name.to_owned(), lease: Bytes::gib(gib) };
        let holders = vec![holder("chat", 90), holder("me", 8)];
        let denied = |why| {
            let denial = Denial { why: Some(why), budget: Bytes::gib(100), holders: holders.clone() };
            Shortage { lease: Some(short), grantor: Grantor::Agent(Some(denial)), ..shortage() }.to_string()
        };
        let end = "The node agent was asked for 2.00 GiB more and denied it after 2.0s: all that the other workers could give is not \
                   enough; this GPU has 100.00 GiB for its workers, leased to chat (90.00 GiB), me (8.00 GiB); raise [node] budget in \
                   the agent's file, end a worker, or move one to another GPU, or allocate less.";
        assert!(denied(Denied::TooLarge).ends_with(end), "{}", denied(Denied::TooLarge));
        assert!(
            denied(Denied::Deadline).contains("(glake shrink chat), or wait longer (lease.grow_timeout_ms")
        );
        for why in [Denied::TooLarge, Denied::Deadline, Denied::Incomplete, Denied::Lost] {
            let text = denied(why);
            assert!(!text.contains("lease.growth") && !text.contains("lease.grant"), "{text}");
        }
        let silent = Shortage { lease: Some(short), grantor: Grantor::Agent(None), ..shortage() }.to_string();
        assert!(silent.contains("has not answered within 2.0s: look whether it runs (glake ps)"), "{silent}");
        let crowded = Shortage { reserved: Bytes::gib(10), allocated: Bytes::gib(9), ..shortage() };
        assert!(crowded.to_string().contains("Something else holds memory"));
        let huge = Shortage { wanted: Bytes::gib(141), ..shortage() };
        let text = huge.to_string();
        assert!(text.ends_with(
            "The whole GPU is smaller than that, so nothing was given back for it: allocate less."
        ));
        assert!(!text.contains("waited"), "it was not: {text}");
    }

    #[test]
    fn amounts_are_torch_s() {
        for (bytes, text) in
            [(1024, "1024 bytes"), (1536, "1.50 KiB"), (1 << 20, "1024.00 KiB"), (1 << 31, "2.00 GiB")]
        {
            assert_eq!(Amount(Bytes::new(bytes)).to_string(), text);
        }
    }
}
