//! Models of servers, built in and from files.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use glake_configs::TOPOLOGIES;

use crate::{Bandwidth, SimLink, SimTopology, TopologyError};

/// Maximum number of GPUs, more than a server has.
const MOST_GPUS: usize = 64;

/// Loads a model by the name of a preset or the path of a file (contains a slash, or ends in `.toml`).
pub fn load(name: &str) -> Result<SimTopology, TopologyError> {
    if let Some((name, text)) = TOPOLOGIES.iter().find(|(preset, _)| *preset == name) {
        return parse(&PathBuf::from(format!("{name}.toml")), text);
    }
    if !name.contains('/') && !name.ends_with(".toml") {
        let names: Vec<&str> = TOPOLOGIES.iter().map(|(name, _)| *name).collect();
        return Err(TopologyError::Unknown { name: name.to_owned(), allowed: names.join(", ") });
    }
    let path = Path::new(name);
    let text = std::fs::read_to_string(path)
        .map_err(|source| TopologyError::Read { path: path.to_owned(), source })?;
    parse(path, &text)
}

/// Parses a model; `path` is used in errors only.
fn parse(path: &Path, text: &str) -> Result<SimTopology, TopologyError> {
    let model: SimTopology = toml::from_str(text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        let line = text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1;
        TopologyError::Malformed {
            path: path.to_owned(),
            line,
            text: text.lines().nth(line - 1).unwrap_or_default().trim().chars().take(80).collect(),
            reason: error.message().replace('\n', " "),
        }
    })?;
    check(path, &model)?;
    Ok(model)
}

/// Rejects values that no server has.
fn check(path: &Path, model: &SimTopology) -> Result<(), TopologyError> {
    let refused = |key: String, found: &dyn Display, allowed: &str| TopologyError::Refused {
        path: path.to_owned(),
        key,
        found: found.to_string(),
        allowed: allowed.to_owned(),
    };
    let rate = |key: String, rate: Bandwidth| match rate.0.is_finite() && rate.0 > 0.0 {
        true => Ok(()),
        false => Err(refused(key, &rate.0, "GB/s above 0")),
    };
    let link = |key: &str, link: &SimLink| {
        rate(format!("{key}.to_gpu"), link.to_gpu)?;
        rate(format!("{key}.from_gpu"), link.from_gpu)?;
        link.both.map_or(Ok(()), |both| rate(format!("{key}.both"), both))
    };
    if model.gpus.is_empty() || model.gpus.len() > MOST_GPUS {
        return Err(refused("gpus".to_owned(), &format!("{} GPUs", model.gpus.len()), "1 to 64 GPUs"));
    }
    let host = &model.host;
    rate("host.read".to_owned(), host.read)?;
    rate("host.write".to_owned(), host.write)?;
    rate("host.pageable_to_gpu".to_owned(), host.pageable_to_gpu)?;
    rate("host.pageable_from_gpu".to_owned(), host.pageable_from_gpu)?;
    for (key, value) in [("host.both", host.both), ("host.far_socket", host.far_socket)] {
        value.map_or(Ok(()), |value| rate(key.to_owned(), value))?;
    }
    for (i, switch) in model.switches.iter().enumerate() {
        link(&format!("switches[{i}]"), switch)?;
    }
    for (i, gpu) in model.gpus.iter().enumerate() {
        link(&format!("gpus[{i}].link"), &gpu.link)?;
        rate(format!("gpus[{i}].local"), gpu.local)?;
        gpu.nvlink.map_or(Ok(()), |nvlink| rate(format!("gpus[{i}].nvlink"), nvlink))?;
        if !(gpu.latency.0.is_finite() && gpu.latency.0 >= 0.0) {
            return Err(refused(
                format!("gpus[{i}].latency"),
                &gpu.latency.0,
                "microseconds that are not negative",
            ));
        }
        if gpu.memory.is_zero() {
            return Err(refused(format!("gpus[{i}].memory"), &gpu.memory, "a size such as \"80GiB\""));
        }
        let count = model.switches.len();
        let missing = |switch: &u32| usize::try_from(*switch).is_ok_and(|switch| switch >= count);
        if let Some(switch) = gpu.switch.filter(missing) {
            let allowed = match count {
                0 => "none: there are no switches".to_owned(),
                count => format!("0 to {}", count - 1),
            };
            return Err(refused(format!("gpus[{i}].switch"), &switch, &allowed));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(from: &str, to: &str) -> String {
        let text = TOPOLOGIES[0].1;
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    }

    fn error(text: &str) -> String {
        let message = parse(Path::new("my.toml"), text).unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn presets_match_their_names() {
        for (name, _) in TOPOLOGIES {
            assert_eq!(&load(name).unwrap().name, name);
        }
        let h200 = load("h200x4").unwrap();
        assert_eq!((h200.gpus.len(), h200.host.read, h200.host.write.0), (4, Bandwidth(213.0), 160.0));
        let h20 = load("h20x8").unwrap();
        assert_eq!((h20.gpus[3].socket, h20.gpus[4].socket), (0, 1));
        assert_eq!((h20.host.far_socket, h20.gpus[0].link.to_gpu.0), (Some(Bandwidth(60.0)), 53.0));
        let a100 = load("a100x8").unwrap();
        assert_eq!((a100.switches.len(), a100.switches[0].to_gpu.0), (4, 24.3));
        let direct = load("h200x4-direct").unwrap();
        assert!(!direct.relay && h200.relay);
        assert_eq!(SimTopology { name: h200.name.clone(), relay: true, ..direct }, h200);
        assert!(load("pcie4x4").unwrap().gpus.iter().all(|gpu| gpu.nvlink.is_none()));
    }

    #[test]
    fn an_unknown_name_lists_the_presets() {
        assert_eq!(
            load("h300x4").unwrap_err().to_string(),
            "topology \"h300x4\" does not exist: allowed is h200x4, h20x8, a100x8, h200x4-direct, pcie4x4, or the path of a .toml file"
        );
        let message = load("no/such/file.toml").unwrap_err().to_string();
        assert!(message.starts_with("no/such/file.toml cannot be read: No such file"), "{message}");
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let message = error(&text("write = 160.0\n", ""));
        assert!(message.starts_with("my.toml:15: [host]: missing field `write`"), "{message}");
        let message = error(&text("read = 213.0", "reed = 213.0"));
        assert!(message.starts_with("my.toml:16: reed = 213.0: unknown field `reed`"), "{message}");
        assert!(message.contains("`read`") && message.contains("`far_socket`"), "{message}");
        let message = error(&text("read = 213.0", "read = \"fast\""));
        assert!(message.starts_with("my.toml:16: read = \"fast\": invalid type"), "{message}");
        let message = error(&text("\"143770MiB\"", "\"143770MB\""));
        assert!(message.contains("143770MB") && message.contains("16MiB"), "{message}");
        let message = error("name = ");
        assert!(message.starts_with("my.toml:1: "), "{message}");
        assert!(error("").contains("missing field `name`"));
    }

    #[test]
    fn impossible_servers_are_refused() {
        assert_eq!(
            error(&text("read = 213.0", "read = -1")),
            "my.toml: host.read = -1: allowed is GB/s above 0"
        );
        assert_eq!(
            error(&text("nvlink = 396.0", "nvlink = nan")),
            "my.toml: gpus[0].nvlink = NaN: allowed is GB/s above 0"
        );
        let message = error(&text("socket = 0,", "socket = 0, switch = 0,"));
        assert_eq!(message, "my.toml: gpus[0].switch = 0: allowed is none: there are no switches");
        assert!(
            error(&text("memory = \"143770MiB\"", "memory = 0")).contains("gpus[0].memory = 0 B: allowed is")
        );
        assert!(error(&text("latency = 7.0", "latency = -1")).contains("gpus[0].latency = -1: allowed is"));
    }
}
