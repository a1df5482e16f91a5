//! `glake top`.

use std::ffi::OsStr;
use std::io::{IsTerminal as _, stdout};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use glake_agent::ask;
use glake_runtime::config::{Config, Environment, Sources};
use glake_units::Bytes;
use glake_wire::{Ask, find_socket};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use serde_json::{Value, json};

use super::Failure;
use super::node::{named_socket, runtime_dir};
use super::output::{Output, note};
use super::serve::meter;
use crate::top::app::{Action, App, Wish};
use crate::top::feed::{Feed, Update};
use crate::top::paint::Look;
use crate::top::print;
use crate::top::processes::{Process, Reading, waste_of};
use crate::top::screen::{Input, Screen};

const TOP: &str = "\
With an agent (glake serve) rows are workers: choose one, put it to sleep (s) or
wake it (w); each is asked once. Without an agent, rows are processes of this
user (root: of all users) with a GLake pool, from the counters that each
publishes. If the agent ends, glake top says so, and goes on without it until
one is back.

Bars:
  a colour or pattern  memory of the worker or process with that mark below
  unused               free memory in its pool, which only it can use
  others               programs that are not in the list, and dead processes
  driver               what the driver keeps
  kept free            memory outside of the agent's budget, and its reserve

Columns:
  on GPU     its memory on all its GPUs, contexts included
  unused     the part of it that no block uses
  in RAM, in files, on others
             evicted memory: contents in host memory, files or other GPUs
  wake-up    how long evicted memory would take to come back, as predicted
  idle for   how long no use has run
  quiet      how long a process's memory has not changed

Keys:         arrows or j, k; s, w; q, Esc or Ctrl-C
Environment:  NO_COLOR for patterns in place of colours; TERM=dumb, or an output
              that is no terminal: one frame, as with --once
JSON:         --json prints snapshots: of an agent as docs/PROTOCOL.md describes
              them, else {source, time_s, gpus, processes}";

/// Shortest interval of frames in seconds.
const LEAST_INTERVAL: f64 = 0.1;
/// Time for the first answers of agent and meter.
const FIRST: Duration = Duration::from_secs(3);

/// Arguments of `glake top`.
#[derive(Debug, Args)]
#[command(after_help = TOP)]
pub struct TopArguments {
    /// The agent's socket [default: GLAKE_AGENT, else as for glake serve]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print one frame, or with --json one snapshot, and end
    #[arg(long)]
    once: bool,
    /// Seconds between two frames or snapshots, 0.1 at least
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (LEAST_INTERVAL..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("{text:?} is no number of seconds from {LEAST_INTERVAL} to 3600")),
    }
}

pub(super) fn run(
    arguments: &TopArguments,
    sources: &Sources,
    config: &Config,
    output: &mut Output,
) -> Result<(), Failure> {
    let environment = &sources.environment;
    let named = named_socket(arguments.socket.as_deref(), config);
    let is_named = named.is_some();
    let socket = named.or_else(|| find_socket(runtime_dir(environment)).ok());
    let interval = Duration::from_secs_f64(arguments.interval);
    let feed = Feed::open(socket, is_named, interval, meter(config).ok(), config.device.choice.to_string());
    if output.is_json() {
        return json_lines(feed, arguments.once, output);
    }
    let text = |name: &str| environment.get(name).and_then(OsStr::to_str);
    let look = Look::from_variables(text("NO_COLOR"), text("TERM"), text("COLORTERM"));
    let is_screen = look != Look::Ascii && stdout().is_terminal();
    if !arguments.once && is_screen {
        return watch(feed, App::new(look), interval);
    }
    if !arguments.once {
        note("this is no terminal for a screen: one frame, as with --once (or --json for lines)");
    }
    // A frame without colours tells memory apart by patterns.
    let look = if look == Look::Ascii || output.has_colours() { look } else { Look::Hatched };
    once(feed, App::new(look), environment, output)
}

/// Seconds of the clock, to which frames are added.
fn second() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn first(feed: &mut Feed) -> Option<Update> {
    if feed.agent().is_none() {
        feed.wait_for_meter(FIRST);
    }
    let until = Instant::now() + FIRST;
    loop {
        let update = feed.next(Duration::from_millis(100));
        if update.is_some() || Instant::now() >= until {
            return update;
        }
    }
}

fn show(app: &mut App, update: &Update) {
    match update {
        Update::Agent(snapshot, pages) => app.show_snapshot(snapshot, pages, second()),
        Update::Pages(reading) => app.show_pages(reading, second()),
    }
}

fn once(mut feed: Feed, mut app: App, environment: &Environment, output: &mut Output) -> Result<(), Failure> {
    match first(&mut feed) {
        Some(update) => show(&mut app, &update),
        None => return Err(Failure::failed("the agent has not answered within 3 s")),
    }
    app.set_notice(feed.notice());
    let number = |name: &str| environment.get(name)?.to_str()?.parse::<u16>().ok();
    let terminal = || ratatui::crossterm::terminal::size().ok().filter(|_| stdout().is_terminal());
    let width = terminal().map(|size| size.0).or_else(|| number("COLUMNS")).unwrap_or(80).clamp(20, 400);
    let area = Rect::new(0, 0, width, app.height_once());
    let mut buffer = Buffer::empty(area);
    app.draw_once(area, &mut buffer);
    output.drawn(&print::text(&buffer, output.has_colours()))
}

fn json_lines(mut feed: Feed, once: bool, output: &mut Output) -> Result<(), Failure> {
    if feed.agent().is_none() {
        feed.wait_for_meter(FIRST);
    }
    loop {
        match feed.next(FIRST) {
            Some(Update::Agent(snapshot, _)) => output.object(&snapshot)?,
            Some(Update::Pages(reading)) => output.object(&json(&reading))?,
            None if once => return Err(Failure::failed("the agent has not answered within 3 s")),
            None => continue,
        }
        if once {
            return Ok(());
        }
    }
}

/// The reading of pages as JSON.
fn json(reading: &Reading) -> Value {
    #[allow(clippy::cast_precision_loss)]
    let process = |process: &Process| {
        let Process { pid, command, counters, .. } = process;
        let quiet_s = reading.now_ns.saturating_sub(counters.changed_ns) as f64 / 1e9;
        let unused: Bytes = counters.gpus.iter().map(waste_of).sum();
        json!({
            "pid": pid, "command": command, "device": counters.backend, "quiet_s": quiet_s, "unused": unused,
            "gpus": counters.gpus,
        })
    };
    let gpus = reading.gpus.iter().map(|(gpu, memory)| {
        json!({ "gpu": gpu, "total": memory.total, "used": memory.used, "driver": memory.reserved })
    });
    json!({
        "source": "pages",
        "time_s": second(),
        "gpus": gpus.collect::<Vec<Value>>(),
        "processes": reading.processes.iter().map(process).collect::<Vec<Value>>(),
    })
}

/// Shows frames until the user ends it.
fn watch(mut feed: Feed, mut app: App, interval: Duration) -> Result<(), Failure> {
    let mut screen = Screen::open().map_err(|error| {
        Failure::failed(format_args!("the terminal cannot be used ({error}): try --once, or --json"))
    })?;
    let (send, answers): (Sender<String>, Receiver<String>) = channel();
    let (mut update, mut is_stale) = (first(&mut feed), true);
    loop {
        if let Some(update) = &update {
            show(&mut app, update);
        }
        is_stale |= app.set_notice(feed.notice());
        app.set_may_command(feed.agent().is_some_and(is_own));
        let answer = answers.try_iter().last();
        if let Some(answer) = &answer {
            app.say(answer);
        }
        if is_stale || update.is_some() || answer.is_some() {
            screen.draw(&mut app)?;
        }
        // Keys at once, a snapshot within a tenth of a second.
        let input = screen.wait(Instant::now() + interval.min(Duration::from_millis(100)))?;
        is_stale = input.is_some();
        match input {
            Some(Input::End) => return Ok(()),
            Some(Input::Key(key)) => match app.press(key) {
                Wish::Quit => return Ok(()),
                Wish::Command(action, worker) => {
                    if let Some(socket) = feed.agent() {
                        app.say(&command(socket, action, worker, send.clone()));
                    }
                }
                Wish::Draw => {}
            },
            Some(Input::Redraw) | None => {}
        }
        update = feed.next(Duration::ZERO);
    }
}

/// Returns whether a socket belongs to this user, whose commands its agent then takes.
fn is_own(socket: &Path) -> bool {
    std::fs::metadata(socket).is_ok_and(|of| of.uid() == rustix::process::geteuid().as_raw())
}

/// Sends a command on a thread of its own, because it lasts until the memory has moved.
fn command(socket: &Path, action: Action, worker: String, answers: Sender<String>) -> String {
    let socket = socket.to_owned();
    let (begun, done, request) = match action {
        Action::Sleep => {
            (format!("{worker} is put to sleep ..."), "sleeps", Ask::Shrink { worker: worker.clone() })
        }
        Action::Wake => {
            (format!("{worker} is woken ..."), "is awake", Ask::Refill { worker: worker.clone() })
        }
    };
    let run = move || {
        let waits = |why: &str| {
            let _ = answers.send(format!("{worker}: {why}"));
        };
        let answer = match ask(&socket, request, waits) {
            Ok(_) => format!("{worker} {done}"),
            Err(error) => error.to_string(),
        };
        let _ = answers.send(answer);
    };
    match std::thread::Builder::new().name("glake-command".to_owned()).spawn(run) {
        Ok(_) => begun,
        Err(error) => format!("the command was not sent: {error}"),
    }
}
