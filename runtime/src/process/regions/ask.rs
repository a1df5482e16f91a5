//! Options of shrinks and refills.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use glake_device::DeviceId;
use glake_tiers::Place;
use glake_units::Bytes;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::super::{ProcessError, Result};

/// Destination of evicted bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// Pinned host memory.
    #[default]
    Host,
    /// Memory of another GPU; `None` selects the one with the most free memory.
    Peer(Option<DeviceId>),
    /// Files in the folder of `tiers.files`.
    File,
}

/// Options of a shrink. The default evicts everything to the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shrink {
    /// Regions to evict; if absent, all, including memory outside regions and graph pools.
    pub tags: Option<Vec<String>>,
    /// Minimum bytes to evict over all GPUs; if absent, everything.
    pub bytes: Option<Bytes>,
    /// GPU to which the shrink is limited.
    #[serde(skip)]
    pub device: Option<DeviceId>,
    /// Destination of the bytes.
    pub tier: Tier,
    /// Whether bytes are compared with their copies; if absent, `tiers.verify` decides.
    pub verify: Option<bool>,
    /// Timeout for running uses; if absent, `tiers.drain_timeout_ms`.
    #[serde(rename = "timeout_ms", deserialize_with = "milliseconds")]
    pub timeout: Option<Duration>,
}

/// Options of a refill. The default refills everything before the call returns.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Refill {
    /// Regions to refill; if absent, all.
    pub tags: Option<Vec<String>>,
    /// Minimum bytes to refill over all GPUs; if absent, everything.
    pub bytes: Option<Bytes>,
    /// Whether bytes are compared with the evicted ones; if absent, `tiers.verify` decides.
    pub verify: Option<bool>,
    /// Whether the call waits for the refill; otherwise it runs in the background.
    pub wait: bool,
    /// Timeout of the wait, after which the refill continues in the background; if absent, none.
    #[serde(rename = "timeout_ms", deserialize_with = "milliseconds")]
    pub timeout: Option<Duration>,
}

impl Default for Refill {
    fn default() -> Self {
        Refill { tags: None, bytes: None, verify: None, wait: true, timeout: None }
    }
}

impl Shrink {
    /// Parses the options from JSON.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the text cannot be parsed.
    pub fn from_json(text: &str) -> Result<Shrink> {
        read("shrink", text)
    }

    /// Returns whether everything that can be evicted is requested.
    pub(super) fn is_everything(&self) -> bool {
        self.tags.is_none() && self.bytes.is_none() && self.device.is_none()
    }
}

impl Refill {
    /// Parses the options from JSON.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the text cannot be parsed.
    pub fn from_json(text: &str) -> Result<Refill> {
        read("refill", text)
    }
}

fn read<T: for<'de> Deserialize<'de>>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|source| {
        ProcessError::invalid(format!("the request to {what} is wrong: {}", without_place(&source)))
    })
}

/// Formats a parser error without its position, unless the position helps: programs write these requests.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match error.classify() {
        serde_json::error::Category::Data => text.strip_suffix(&place).unwrap_or(&text).to_owned(),
        _ => text,
    }
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

/// Returns the name of a place as requests spell it.
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
