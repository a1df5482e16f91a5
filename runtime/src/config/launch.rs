//! Launch environment of a worker: its rank, its run and the user's runtime folder.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::Environment;

/// Name that torchrun gives to an unnamed run.
const UNNAMED: &str = "none";

/// Identity of this process for an agent, as stated by its launcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// Rank of the process; `None`: a single process.
    pub rank: Option<u32>,
    /// Number of local ranks, which receive memory together.
    pub ranks: u32,
    /// Identifier shared by all ranks of the run and by no other run.
    pub run: Option<String>,
    /// Folder of the user's sockets (`XDG_RUNTIME_DIR`).
    pub runtime_dir: Option<PathBuf>,
}

impl Launch {
    /// Reads the launch environment. Unreadable values are ignored.
    pub fn of(environment: &Environment) -> Launch {
        let text = |name| {
            environment.get(name).and_then(OsStr::to_str).map(str::trim).filter(|text| !text.is_empty())
        };
        let number = |name| text(name).and_then(|text| text.parse::<u32>().ok());
        let runtime_dir = environment.get("XDG_RUNTIME_DIR").map(PathBuf::from);
        let rank = number("RANK").filter(|_| number("WORLD_SIZE").is_some_and(|ranks| ranks > 1));
        let master = || Some(format!("{}:{}", text("MASTER_ADDR")?, text("MASTER_PORT")?));
        let named = text("TORCHELASTIC_RUN_ID").filter(|run| *run != UNNAMED).map(str::to_owned);
        let run = rank.and_then(|_| named.or_else(master));
        // An agent sees the ranks of its own machine.
        let here = number("LOCAL_WORLD_SIZE").or(number("WORLD_SIZE"));
        let ranks = if run.is_some() { here.unwrap_or(1).max(1) } else { 1 };
        Launch { rank, ranks: if rank.is_some() { ranks } else { 0 }, run, runtime_dir }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Launch {
        Launch::of(&variables.iter().copied().collect())
    }

    #[test]
    fn ranks_of_a_run_have_its_name() {
        assert_eq!(launch(&[]), Launch::default());
        let alone = launch(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]);
        assert_eq!(alone, Launch::default());
        let of_torch = [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "n0"), ("MASTER_PORT", "29500")];
        let found = launch(&of_torch);
        assert_eq!((found.rank, found.ranks, found.run.as_deref()), (Some(3), 8, Some("n0:29500")));
        let named = [&of_torch[..], &[("TORCHELASTIC_RUN_ID", "job"), ("LOCAL_WORLD_SIZE", "4")]].concat();
        let found = launch(&named);
        assert_eq!((found.rank, found.ranks, found.run.as_deref()), (Some(3), 4, Some("job")));
        let unnamed = [&of_torch[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(launch(&unnamed).run.as_deref(), Some("n0:29500"));
        let lost = launch(&[("RANK", "1"), ("WORLD_SIZE", "2")]);
        assert_eq!((lost.rank, lost.ranks, lost.run), (Some(1), 1, None));
        assert_eq!(launch(&[("RANK", "x"), ("WORLD_SIZE", "2")]).rank, None);
    }
}
