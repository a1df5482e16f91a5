//! The terminal of `glake top`: its screen, its keys, and the signals that end or stop a program.
//!
//! Invariant: the terminal is restored whatever ends the program or stops it: the last frame, an error, a panic, Ctrl-C, Ctrl-Z, SIGTERM,
//! SIGHUP or SIGTSTP.

use std::fs::File;
use std::io::{self, IsTerminal as _, Stdout, stdin, stdout};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getpgid, getpgrp, getppid, getsid};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};

use super::app::{App, Key};

/// Longest time in which a signal is not seen.
const LOOK: Duration = Duration::from_millis(100);

/// Input of the user or the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A key of the program.
    Key(Key),
    /// The screen has to be drawn again.
    Redraw,
    /// The program has to end.
    End,
}

/// Terminal that shows frames.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    /// Where keys come from.
    input: OwnedFd,
    ends: Arc<AtomicBool>,
    stops: Arc<AtomicBool>,
    continues: Arc<AtomicBool>,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// The operating system's error; the terminal is as before.
    pub fn open() -> io::Result<Screen> {
        let flags: [Arc<AtomicBool>; 3] = Default::default();
        let [ends, stops, continues] = flags;
        for (flag, signals) in
            [(&ends, &[SIGTERM, SIGHUP, SIGINT, SIGQUIT][..]), (&stops, &[SIGTSTP]), (&continues, &[SIGCONT])]
        {
            signals
                .iter()
                .try_for_each(|signal| signal_hook::flag::register(*signal, flag.clone()).map(|_| ()))?;
        }
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
        }));
        let input = match stdin().is_terminal() {
            true => stdin().as_fd().try_clone_to_owned()?,
            false => File::open("/dev/tty")?.into(),
        };
        enter().inspect_err(|_| restore())?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout())).inspect_err(|_| restore())?;
        Ok(Screen { terminal, input, ends, stops, continues })
    }

    /// Draws a frame.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn draw(&mut self, app: &mut App) -> io::Result<()> {
        self.terminal.draw(|frame| {
            let area = frame.area();
            app.draw(area, frame.buffer_mut());
        })?;
        Ok(())
    }

    /// Waits for input, at most until `until`. Stops the program where that is asked for, and continues afterwards.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn wait(&mut self, until: Instant) -> io::Result<Option<Input>> {
        loop {
            if self.ends.load(Ordering::Relaxed) {
                return Ok(Some(Input::End));
            }
            if self.stops.swap(false, Ordering::Relaxed) {
                self.stop()?;
                return Ok(Some(Input::Redraw));
            }
            if self.continues.swap(false, Ordering::Relaxed) {
                self.enter_again()?;
                return Ok(Some(Input::Redraw));
            }
            let left = until.saturating_duration_since(Instant::now());
            // The library would read a terminal that is gone again and again: it is waited for here. What it has read already comes first.
            if state(&self.input, Duration::ZERO) == State::Gone {
                return Ok(Some(Input::End));
            }
            if has_event()? || self.comes(left.min(LOOK))? {
                if let Some(input) = self.read()? {
                    return Ok(Some(input));
                }
            } else if left.is_zero() {
                return Ok(None);
            }
        }
    }

    /// Waits for an event. Returns whether there is one; a terminal that is gone is seen by the next look.
    fn comes(&self, most: Duration) -> io::Result<bool> {
        match state(&self.input, most) {
            State::Gone => Ok(false),
            // A change of size is an event, and no input.
            State::Quiet => has_event(),
            State::Readable => {
                let has_event = has_event()?;
                if !has_event {
                    // The library does not see a key that came with a change of size until the next one comes.
                    std::thread::sleep(LOOK / 10);
                }
                Ok(has_event)
            }
        }
    }

    fn read(&mut self) -> io::Result<Option<Input>> {
        match event::read()? {
            Event::Resize(..) => Ok(Some(Input::Redraw)),
            Event::Key(key) if key.kind != KeyEventKind::Release => match input(key) {
                Some(Pressed::Input(input)) => Ok(Some(input)),
                Some(Pressed::Stop) => {
                    self.stop()?;
                    Ok(Some(Input::Redraw))
                }
                None => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Stops the program as Ctrl-Z does, with the others of its job, until a shell continues it. Without such a shell it goes on.
    fn stop(&mut self) -> io::Result<()> {
        if !has_shell() {
            return Ok(());
        }
        restore();
        // Not SIGTSTP, which this program handles.
        killpg(getpgrp(), Signal::SIGSTOP).map_err(io::Error::from)?;
        self.continues.store(false, Ordering::Relaxed);
        self.enter_again()
    }

    fn enter_again(&mut self) -> io::Result<()> {
        // After a stop from outside the library takes the terminal for raw already.
        let _ = disable_raw_mode();
        enter()?;
        // Not Terminal::clear, which asks the terminal for the cursor and waits for its answer.
        execute!(stdout(), Clear(ClearType::All))?;
        self.terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Whether a shell can continue this process's job: the first process above it is of the same session.
fn has_shell() -> bool {
    let group = getpgrp();
    let mut above = getppid();
    while getpgid(Some(above)).is_ok_and(|of| of == group) {
        let stat = std::fs::read_to_string(format!("/proc/{above}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        let Some(parent) = parent else { return false };
        above = Pid::from_raw(parent);
    }
    getsid(Some(above)).is_ok_and(|session| getsid(None) == Ok(session))
}

#[derive(PartialEq, Eq)]
enum State {
    Quiet,
    Readable,
    Gone,
}

/// Waits for input, a signal or the time.
fn state(input: &OwnedFd, most: Duration) -> State {
    let mut ready = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    let most = PollTimeout::try_from(most).unwrap_or(PollTimeout::ZERO);
    // Interrupted by a signal: the caller looks for it.
    let _ = poll(&mut ready, most);
    let found = ready[0].revents().unwrap_or(PollFlags::empty());
    match found.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL) {
        true => State::Gone,
        false if found.is_empty() => State::Quiet,
        false => State::Readable,
    }
}

fn has_event() -> io::Result<bool> {
    event::poll(Duration::ZERO).or_else(|error| match error.kind() {
        io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error),
    })
}

enum Pressed {
    Input(Input),
    Stop,
}

fn input(key: KeyEvent) -> Option<Pressed> {
    let key = match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            return Some(Pressed::Input(Input::End));
        }
        KeyCode::Char('z') if key.modifiers.contains(KeyModifiers::CONTROL) => return Some(Pressed::Stop),
        KeyCode::Char('l') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            return Some(Pressed::Input(Input::Redraw));
        }
        KeyCode::Char(character) => Key::Character(character),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        _ => return None,
    };
    Some(Pressed::Input(Input::Key(key)))
}

fn enter() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen)
}

/// Restores the terminal; also one that was not taken, or is gone.
fn restore() {
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}
