//! What ends of an earlier release say and understand, held against the types of this one.
//!
//! `SAID_*` was recorded on sockets of release 69c6f693; [`Heard`] is how its worker read what an agent says. A field that is added may be
//! absent, and an `op` is passed over; a new value of a field that is known ends the connection, so it is said only to a peer that knows it.

use serde::Deserialize;

use crate::frame::{Envelope, Frames, MOST_BYTES, VERSION, frame};
use crate::{Denied, Hello, Holder, Holding, Occupancy, Tier, ToAgent, ToWorker, Welcome};
use glake_units::Bytes;

/// One frame of each kind, recorded from a worker.
const SAID_TO_AGENT: &[&str] = &[
    r#"{"v":1,"seq":0,"ack":0,"op":"hello","name":"chat","peer":{"pid":4818,"start":338504},"build":"0.1.0","gang":null,"ranks":1,"epoch":0,"received":0,"starting":false,"wants":false,"holdings":[]}"#,
    r#"{"v":1,"seq":2,"ack":0,"op":"changed","holdings":[{"gpu":"0","device":0,"lease":0,"resident":0,"fixed":0,"evicted":0,"room":0,"dirty":0,"discardable":0,"hosted":0}]}"#,
    r#"{"v":1,"seq":3,"ack":0,"op":"grow","gpu":"0","bytes":16777216,"within_ms":3000}"#,
    r#"{"v":1,"seq":0,"ack":2,"op":"ack"}"#,
    r#"{"v":1,"seq":5,"ack":3,"op":"parked"}"#,
    r#"{"v":1,"seq":6,"ack":4,"op":"returned","gpu":"0","bytes":33554432}"#,
    r#"{"v":1,"seq":8,"ack":4,"op":"shrunk","holdings":[{"gpu":"0","device":0,"lease":0,"resident":0,"fixed":0,"evicted":33554432,"room":0,"dirty":0,"discardable":0,"hosted":33554432}]}"#,
    r#"{"v":1,"seq":10,"ack":4,"op":"want","deadline_ms":30000}"#,
    r#"{"v":1,"seq":13,"ack":7,"op":"refilled","holdings":[{"gpu":"0","device":0,"lease":33554432,"resident":33554432,"fixed":0,"evicted":0,"room":0,"dirty":33554432,"discardable":0,"hosted":0}]}"#,
    r#"{"v":1,"seq":14,"ack":8,"op":"failed","what":"shrink","why":"GPU 9 is none of this process's","holdings":[]}"#,
];

/// One frame of each recorded kind, from an agent.
const SAID_TO_WORKER: &[&str] = &[
    r#"{"v":1,"seq":0,"ack":0,"op":"welcome","epoch":1795915027020558,"received":0,"worker":1,"wait":false}"#,
    r#"{"v":1,"seq":1,"ack":1,"op":"grant","gpu":"0","bytes":33554432}"#,
    r#"{"v":1,"seq":2,"ack":1,"op":"admit"}"#,
    r#"{"v":1,"seq":0,"ack":2,"op":"ack"}"#,
    r#"{"v":1,"seq":3,"ack":2,"op":"shrink","gpu":"0","bytes":33554432,"tier":"file","within_ms":30200,"more":false}"#,
    r#"{"v":1,"seq":4,"ack":4,"op":"demote","bytes":32715632}"#,
    r#"{"v":1,"seq":5,"ack":5,"op":"refill"}"#,
    r#"{"v":1,"seq":8,"ack":8,"op":"deny_growth","gpu":"0","bytes":1125899906842624,"holders":[{"name":"chat","lease":33554432}]}"#,
    r#"{"v":1,"seq":9,"ack":10,"op":"deny","why":"deadline","retry_after_ms":434178}"#,
    r#"{"v":1,"seq":0,"ack":0,"op":"refused","why":"the first frame is hello, or an operator's"}"#,
];

/// A frame as that release's worker decodes it.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Heard {
    Welcome {
        epoch: u64,
        received: u64,
        worker: u64,
        wait: bool,
    },
    Refused {
        why: String,
    },
    Grant {
        gpu: String,
        bytes: Bytes,
    },
    Admit,
    Park {
        within_ms: u64,
    },
    Unpark,
    Shrink {
        gpu: String,
        bytes: Bytes,
        tier: HeardTier,
        within_ms: u64,
    },
    Demote {
        bytes: Bytes,
    },
    Deny {
        why: HeardDenied,
        retry_after_ms: Option<u64>,
    },
    DenyGrowth {
        gpu: String,
        bytes: Bytes,
    },
    Refill,
    Ack,
    #[serde(other)]
    Unknown,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HeardTier {
    Peer(String),
    Host,
    File,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HeardDenied {
    TooLarge,
    Deadline,
    Incomplete,
    Lost,
}

fn read<M: serde::de::DeserializeOwned>(bytes: &[u8]) -> Envelope<M> {
    let mut frames = Frames::default();
    frames.push(bytes);
    frames.take().unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&bytes[4..]))).unwrap()
}

fn framed(json: &str) -> Vec<u8> {
    assert!(json.len() <= MOST_BYTES);
    [&u32::try_from(json.len()).unwrap().to_le_bytes()[..], json.as_bytes()].concat()
}

#[test]
fn frames_of_an_earlier_release_are_understood() {
    for json in SAID_TO_AGENT {
        let heard: Envelope<ToAgent> = read(&framed(json));
        assert!(heard.message != ToAgent::Unknown, "{json}");
        // A missing field means unknown, not zero.
        if let ToAgent::Changed { holdings } | ToAgent::Refilled { holdings } = heard.message {
            assert_eq!((holdings[0].unused, holdings[0].as_of), (None, None));
            assert_eq!((holdings[0].in_files, holdings[0].in_peers), (None, None));
        }
    }
    for json in SAID_TO_WORKER {
        let heard: Envelope<ToWorker> = read(&framed(json));
        assert!(heard.message != ToWorker::Unknown, "{json}");
        // Encoding it again loses no required field.
        let again = String::from_utf8(frame(&heard).unwrap().split_off(4)).unwrap();
        let fields =
            |json: &str| serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(json).unwrap();
        let (before, again) = (fields(json), fields(&again));
        before
            .iter()
            .for_each(|(field, value)| assert_eq!(again.get(field), Some(value), "{field} of {json}"));
    }
}

/// Returns one message of each kind that this release sends. A new variant must be added here.
fn said() -> Vec<ToWorker> {
    let (gpu, bytes) = (|| "0".to_owned(), Bytes::mib(1));
    let tiers = [Tier::Peer("1".to_owned()), Tier::Host, Tier::File];
    let denials = [Denied::TooLarge, Denied::Deadline, Denied::Incomplete, Denied::Lost];
    tiers.iter().for_each(|tier| match tier {
        Tier::Peer(_) | Tier::Host | Tier::File => {}
    });
    denials.iter().for_each(|why| match why {
        Denied::TooLarge | Denied::Deadline | Denied::Incomplete | Denied::Lost => {}
    });
    let shrink = |tier| ToWorker::Shrink { gpu: gpu(), bytes, tier, within_ms: 1, more: true };
    let holders = vec![Holder { name: "chat".to_owned(), lease: bytes }];
    let occupancy = || Occupancy { gpu: gpu(), budget: bytes, holders: holders.clone() };
    let deny = |why| ToWorker::Deny { why, retry_after_ms: None, gpus: vec![occupancy()] };
    let others = [
        ToWorker::Welcome(Welcome::default()),
        ToWorker::Refused { why: "no".to_owned(), passes: true },
        ToWorker::Grant { gpu: gpu(), bytes },
        ToWorker::Admit,
        ToWorker::Park { within_ms: 1 },
        ToWorker::Unpark,
        ToWorker::Demote { bytes },
        ToWorker::DenyGrowth {
            gpu: gpu(),
            bytes,
            holders: holders.clone(),
            budget: bytes,
            why: Some(Denied::TooLarge),
        },
        ToWorker::Refill,
        ToWorker::Ack,
    ];
    others.into_iter().chain(tiers.map(shrink)).chain(denials.map(deny)).collect()
}

#[test]
fn a_worker_of_an_earlier_release_understands_every_message() {
    for message in said() {
        let heard: Envelope<Heard> = read(&frame(&Envelope { v: VERSION, seq: 1, ack: 0, message }).unwrap());
        assert!(heard.message != Heard::Unknown);
    }
}

/// An agent of an earlier release passes over fields that it does not know, wherever they stand.
#[test]
fn new_fields_of_holdings_keep_the_old_ones() {
    let mib = Some(Bytes::mib(1));
    let holding = Holding { unused: mib, as_of: Some(7), in_files: mib, in_peers: mib, ..Holding::default() };
    let hello = Hello { holdings: vec![holding], ..Hello::default() };
    let said =
        String::from_utf8(frame(&Envelope::unnumbered(ToAgent::Hello(hello))).unwrap().split_off(4)).unwrap();
    for field in
        ["gpu", "device", "lease", "resident", "fixed", "evicted", "room", "dirty", "discardable", "hosted"]
    {
        assert!(said.contains(&format!("\"{field}\":")), "{said}");
    }
}
