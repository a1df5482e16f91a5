//! What a shrink and a refill are asked for.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use glake_device::DeviceId;
use glake_tiers::Place;
use glake_units::Bytes;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::super::{ProcessError, Result};

/// Where a shrink puts bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// Pinned memory of the host.
    #[default]
    Host,
    /// The memory of another GPU; `None`: of the one that has the most free.
    Peer(Option<DeviceId>),
    /// Files in the folder of `tiers.files`.
    File,
}

/// What shall leave its GPUs. The default: everything, to the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shrink {
    /// These regions; absent: all, the memory of no region and graphs' pools too.
    pub tags: Option<Vec<String>>,
    /// At least so much, over all GPUs; absent: all of it.
    pub bytes: Option<Bytes>,
    /// Of this GPU alone.
    #[serde(skip)]
    pub device: Option<DeviceId>,
    /// Where to.
    pub tier: Tier,
    /// Whether bytes are compared with their copies; absent: as `tiers.verify` says.
    pub verify: Option<bool>,
    /// How long uses that run are waited for; absent: as `tiers.drain_timeout_ms` says.
    #[serde(rename = "timeout_ms", deserialize_with = "milliseconds")]
    pub timeout: Option<Duration>,
}

/// What shall come back. The default: everything, before the call returns.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Refill {
    /// These regions; absent: all.
    pub tags: Option<Vec<String>>,
    /// At least so much, over all GPUs; absent: all of it.
    pub bytes: Option<Bytes>,
    /// Whether bytes are compared with what they were; absent: as `tiers.verify` says.
    pub verify: Option<bool>,
    /// Whether the call waits for it; false: it goes on in the background.
    pub wait: bool,
    /// How long it is waited for; what is not back by then comes in the background. Absent: until it is over.
    #[serde(rename = "timeout_ms", deserialize_with = "milliseconds")]
    pub timeout: Option<Duration>,
}

impl Default for Refill {
    fn default() -> Self {
        Refill { tags: None, bytes: None, verify: None, wait: true, timeout: None }
    }
}

impl Shrink {
    /// As JSON has it.
    ///
    /// # Errors
    /// [`ProcessError::BadAsk`].
    pub fn from_json(text: &str) -> Result<Shrink> {
        read("shrink", text)
    }

    /// Whether nothing that can leave is to stay.
    pub(super) fn is_everything(&self) -> bool {
        self.tags.is_none() && self.bytes.is_none() && self.device.is_none()
    }
}

impl Refill {
    /// As JSON has it.
    ///
    /// # Errors
    /// [`ProcessError::BadAsk`].
    pub fn from_json(text: &str) -> Result<Refill> {
        read("refill", text)
    }
}

fn read<T: for<'de> Deserialize<'de>>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|source| ProcessError::BadAsk { what, source })
}

fn milliseconds<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Duration>, D::Error> {
    Ok(Option::<u64>::deserialize(from)?.map(Duration::from_millis))
}

impl FromStr for Tier {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Tier, &'static str> {
        match (text, text.strip_prefix("peer:").map(str::parse)) {
            ("host", _) => Ok(Tier::Host),
            ("file", _) => Ok(Tier::File),
            ("peer", _) => Ok(Tier::Peer(None)),
            (_, Some(Ok(device))) => Ok(Tier::Peer(Some(DeviceId(device)))),
            _ => Err("\"host\", \"peer\", \"peer:1\" and \"file\" are there"),
        }
    }
}

impl<'de> Deserialize<'de> for Tier {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Tier, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(|allowed| D::Error::custom(format_args!("tier \"{text}\": {allowed}")))
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tier::Host => f.write_str("host"),
            Tier::Peer(None) => f.write_str("peer"),
            Tier::Peer(Some(device)) => write!(f, "peer:{}", device.0),
            Tier::File => f.write_str("file"),
        }
    }
}

/// A place as requests name it.
pub(super) fn place_name(place: Place) -> String {
    match place {
        Place::Gpu => "gpu".to_owned(),
        Place::Host => Tier::Host.to_string(),
        Place::Peer(device) => Tier::Peer(Some(device)).to_string(),
        Place::File => Tier::File.to_string(),
        Place::Nowhere => "nowhere".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_and_mistakes_named() {
        assert_eq!(Shrink::from_json("{}").unwrap(), Shrink::default());
        let text = r#"{"tags":["a"],"bytes":"40GiB","tier":"peer:1","verify":true,"timeout_ms":20}"#;
        let ask = Shrink::from_json(text).unwrap();
        assert_eq!((ask.tier, ask.bytes), (Tier::Peer(Some(DeviceId(1))), Some(Bytes::gib(40))));
        assert_eq!((ask.timeout, ask.verify), (Some(Duration::from_millis(20)), Some(true)));
        assert_eq!(Refill::from_json(r#"{"bytes":5}"#).unwrap().bytes, Some(Bytes::new(5)));
        assert_eq!(Refill::from_json("{}").unwrap(), Refill::default());
        assert!(Refill::default().wait);
        let bounded = Refill::from_json(r#"{"timeout_ms":7}"#).unwrap();
        assert_eq!(bounded.timeout, Some(Duration::from_millis(7)));
        for (text, says) in [
            (r#"{"tier":"tape"}"#, "tier \"tape\": \"host\", \"peer\""),
            (r#"{"tag":"a"}"#, "unknown field `tag`, expected one of `tags`"),
            ("[", "EOF"),
            (r#"{"timeout_ms":-1}"#, "invalid value"),
        ] {
            let error = Shrink::from_json(text).unwrap_err().to_string();
            assert!(error.starts_with("the request to shrink is wrong: ") && error.contains(says), "{error}");
        }
    }

    #[test]
    fn places_are_named_as_tiers() {
        for name in ["host", "peer", "peer:3", "file"] {
            assert_eq!(name.parse::<Tier>().unwrap().to_string(), name);
        }
        assert_eq!(place_name(Place::Peer(DeviceId(2))), "peer:2");
    }
}
