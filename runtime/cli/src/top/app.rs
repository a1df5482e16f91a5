//! The state of `glake top` between two frames: the scene, the last minute, the chosen row and the open question. Pure: keys and readings in,
//! commands out.

use std::collections::BTreeMap;

use glake_units::Bytes;
use glake_wire::{DecisionRow, Snapshot};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use super::draw::{HISTORY_S, View, draw};
use super::paint::Look;
use super::processes::{Process, Reading, waste_of};
use super::scene::{Row, Scene, clean};

/// Number of decisions that are remembered.
const MOST_DECISIONS: usize = 256;

/// Key of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// A character.
    Character(char),
    /// The row above.
    Up,
    /// The row below.
    Down,
    /// Confirmation.
    Enter,
    /// No, or the end.
    Escape,
}

/// Command for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Its memory leaves its GPUs.
    Sleep,
    /// Its memory comes back.
    Wake,
}

/// What a key asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing but another frame.
    Draw,
    /// The end.
    Quit,
    /// A command for a worker, which the user has confirmed.
    Command(Action, String),
}

/// State between two frames.
#[derive(Clone, Debug)]
pub struct App {
    scene: Scene,
    view: View,
    /// By number, with the second in which they were received.
    decisions: BTreeMap<u64, (u64, DecisionRow)>,
    /// Second of the last sample of the last minute.
    sampled: Option<u64>,
    /// Whether the agent takes commands of this user.
    may_command: bool,
    question: Option<(Action, String)>,
    /// Answer to the last command, or the command under way.
    message: Option<String>,
}

impl App {
    /// Returns an app without contents.
    pub fn new(look: Look) -> App {
        App {
            scene: Scene::default(),
            view: View::new(look),
            decisions: BTreeMap::new(),
            sampled: None,
            may_command: false,
            question: None,
            message: None,
        }
    }

    /// Shows a snapshot of an agent; `second` counts from any time, and `pages` are those of processes that can be read.
    pub fn show_snapshot(&mut self, snapshot: &Snapshot, pages: &Reading, second: u64) {
        for decision in &snapshot.decisions {
            self.decisions.insert(decision.number, (second, decision.row.clone()));
        }
        while self.decisions.len() > MOST_DECISIONS {
            self.decisions.pop_first();
        }
        let waste =
            |process: &Process| (process.pid, process.counters.gpus.iter().map(waste_of).sum::<Bytes>());
        let waste = pages.processes.iter().map(waste).collect();
        #[allow(clippy::cast_precision_loss)]
        let aged = |(received, _): &(u64, DecisionRow)| second.saturating_sub(*received) as f64;
        let decisions = self.decisions.values().map(|of| (aged(of), &of.1));
        let scene = Scene::from_snapshot(snapshot, decisions, &waste);
        self.show(scene, second);
    }

    /// Shows the pages of processes.
    pub fn show_pages(&mut self, reading: &Reading, second: u64) {
        self.decisions.clear();
        self.question = None;
        self.show(Scene::from_pages(reading), second);
    }

    fn show(&mut self, scene: Scene, second: u64) {
        self.scene = scene;
        self.view.marks.update(self.scene.rows.iter().map(|row| row.key.as_str()));
        let lives = |key: &String| self.scene.rows.iter().any(|row| row.key == *key);
        self.view.chosen = self.view.chosen.take().filter(lives);
        self.sample(second);
    }

    /// Adds the present to the last minute, once a second; seconds without a frame repeat the one before.
    fn sample(&mut self, second: u64) {
        let passed = self.sampled.map_or(1, |before| second.saturating_sub(before));
        if passed == 0 {
            return;
        }
        self.sampled = Some(second);
        let gpus = &self.scene.gpus;
        self.view.history.retain(|name, _| gpus.iter().any(|gpu| gpu.name == *name));
        for gpu in gpus {
            let share = if gpu.total.is_zero() { 0.0 } else { gpu.used.fraction_of(gpu.total).min(1.0) };
            let shares = self.view.history.entry(gpu.name.clone()).or_default();
            if let Some(last) = shares.back().copied() {
                let missed = usize::try_from(passed - 1).unwrap_or(HISTORY_S).min(HISTORY_S);
                shares.extend(std::iter::repeat_n(last, missed));
            }
            shares.push_back(share);
            while shares.len() > HISTORY_S {
                shares.pop_front();
            }
        }
    }

    /// Sets what is wrong with the source; returns whether that is news.
    pub fn set_notice(&mut self, notice: Option<String>) -> bool {
        let before = std::mem::replace(&mut self.view.notice, notice);
        before != self.view.notice
    }

    /// Sets whether the agent takes commands of this user.
    pub fn set_may_command(&mut self, may: bool) {
        self.may_command = may;
    }

    /// Shows the answer to a command, or the command under way.
    pub fn say(&mut self, message: &str) {
        self.message = Some(clean(message, 400));
    }

    /// Handles a key.
    pub fn press(&mut self, key: Key) -> Wish {
        if let Some((action, worker)) = self.question.take() {
            self.message = None;
            return match key {
                Key::Character('y' | 'Y') | Key::Enter => Wish::Command(action, worker),
                _ => Wish::Draw,
            };
        }
        self.message = None;
        match key {
            Key::Character('q') | Key::Escape => return Wish::Quit,
            Key::Up | Key::Character('k') => self.choose(false),
            Key::Down | Key::Character('j') => self.choose(true),
            Key::Character('s') => self.ask(Action::Sleep),
            Key::Character('w') => self.ask(Action::Wake),
            _ => {}
        }
        Wish::Draw
    }

    fn chosen(&self) -> Option<&Row> {
        self.scene.rows.iter().find(|row| Some(&row.key) == self.view.chosen.as_ref())
    }

    fn choose(&mut self, below: bool) {
        let rows = &self.scene.rows;
        let at = rows.iter().position(|row| Some(&row.key) == self.view.chosen.as_ref());
        let next = match (at, below) {
            (None, true) => 0,
            (None, false) => rows.len().saturating_sub(1),
            (Some(at), true) => (at + 1).min(rows.len().saturating_sub(1)),
            (Some(at), false) => at.saturating_sub(1),
        };
        self.view.chosen = rows.get(next).map(|row| row.key.clone());
    }

    /// Asks whether a command is meant, or says why it is not possible.
    fn ask(&mut self, action: Action) {
        let Some(row) = self.chosen() else {
            self.message = Some(match self.scene.is_agent {
                true => "choose a worker first (arrow keys)".to_owned(),
                false => "only an agent puts workers to sleep and wakes them (glake serve)".to_owned(),
            });
            return;
        };
        let (may, why) = match action {
            Action::Sleep => (row.may_sleep, "has no memory on a GPU"),
            Action::Wake => (row.may_wake, "has no memory that could come back"),
        };
        self.message = match (self.scene.is_agent, self.may_command, may) {
            (false, ..) => {
                Some("only an agent puts workers to sleep and wakes them (glake serve)".to_owned())
            }
            (_, false, _) => Some("the agent is another user's: it takes no commands from here".to_owned()),
            (.., false) => Some(format!("{} {why}", row.name)),
            _ => {
                self.question = Some((action, row.key.clone()));
                None
            }
        };
    }

    /// Draws the present frame.
    pub fn draw(&mut self, area: Rect, buffer: &mut Buffer) {
        let keys = if self.view.look == Look::Ascii { "up/down" } else { "↑↓" };
        let row = self.question.as_ref().and_then(|_| self.chosen()).map(|row| row.name.clone());
        let (footer, is_urgent) = match (&self.question, &self.message) {
            (Some((Action::Sleep, worker)), _) => {
                let name = row.unwrap_or_else(|| clean(worker, 40));
                (
                    format!("Put {name} to sleep? Its GPU memory goes to the host until its next use.  y/n"),
                    true,
                )
            }
            (Some((Action::Wake, worker)), _) => {
                let name = row.unwrap_or_else(|| clean(worker, 40));
                (format!("Wake {name}? Others may have to sleep for it.  y/n"), true)
            }
            (None, Some(message)) => (message.clone(), true),
            (None, None) if self.scene.is_agent && self.may_command => {
                (format!("{keys} choose a worker   s put it to sleep   w wake it   q quit"), false)
            }
            (None, None) => (format!("{keys} scroll   q quit"), false),
        };
        (self.view.footer, self.view.is_urgent) = (footer, is_urgent);
        draw(&self.scene, &self.view, area, buffer);
    }

    /// Returns the height at which a frame without keys shows everything, within reason.
    pub fn height_once(&self) -> u16 {
        let Scene { is_agent, gpus, rows, queue, events, .. } = &self.scene;
        let lists = if *is_agent { 2 + 4 * queue.len().min(20) + 1 + 2 * events.len().min(12) } else { 3 };
        let whole = 6 + gpus.len().max(1) + rows.len().clamp(1, 100) + lists;
        u16::try_from(whole.clamp(8, 400)).unwrap_or(400)
    }

    /// Draws a frame without keys, for `--once`, as high as its contents need and at most as high as the area.
    pub fn draw_once(&mut self, area: Rect, buffer: &mut Buffer) {
        (self.view.footer, self.view.is_urgent) = (String::new(), false);
        draw(&self.scene, &self.view, area, buffer);
    }
}
