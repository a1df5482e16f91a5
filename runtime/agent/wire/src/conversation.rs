//! One direction of a conversation that outlives its connections: each message is received once, in order.
//!
//! ```text
//! push ─► 1 2 3 4 5 ─► next: sent once a connection     ack 2: 1 and 2 are forgotten
//! a new connection to the same agent: what the other end has not received is sent again
//! a new agent (another epoch): what was pushed before hello is in hello; the rest is numbered from 1
//! ```

use std::collections::VecDeque;

use serde::Serialize;

use crate::frame::{Envelope, FrameError, VERSION, frame};

/// Classification of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Next message in order; the caller must handle it now.
    New,
    /// Duplicate of an earlier message, or a message without a number.
    Repeated,
    /// An earlier message is missing: the connection must be closed.
    Gap,
}

/// Outgoing messages of one end, and the number of the last message it received.
#[derive(Clone, Debug)]
pub struct Conversation<M> {
    /// Messages that are not acknowledged yet; the first has the number `first`.
    kept: VecDeque<M>,
    first: u64,
    /// Number of `kept` messages that were sent on this connection.
    sent: usize,
    received: u64,
    /// Number of the last message acknowledged on this connection.
    acknowledged: u64,
}

impl<M> Default for Conversation<M> {
    fn default() -> Self {
        Conversation { kept: VecDeque::new(), first: 1, sent: 0, received: 0, acknowledged: 0 }
    }
}

impl<M: Serialize + Clone> Conversation<M> {
    /// Appends a message to the queue.
    pub fn push(&mut self, message: M) {
        self.kept.push_back(message);
    }

    /// Returns the number of the next message to be queued; a `hello` describes the state as of that number.
    pub fn position(&self) -> u64 {
        self.first + self.kept.len() as u64
    }

    /// Returns the number of messages that the other end has not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.kept.len()
    }

    /// Returns the number of the last message received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the next frame to send. Without a message to send, `ack` carries the acknowledgement.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]: that message is dropped.
    pub fn next(&mut self, ack: M) -> Result<Option<Vec<u8>>, FrameError> {
        let message = self.kept.get(self.sent).cloned();
        if message.is_none() && self.acknowledged == self.received {
            return Ok(None);
        }
        let is_said = message.is_some();
        let seq = if is_said { self.first + self.sent as u64 } else { 0 };
        let message = message.unwrap_or(ack);
        let framed = frame(&Envelope { v: VERSION, seq, ack: self.received, message });
        match (&framed, is_said) {
            (Ok(_), _) => {
                self.sent += usize::from(is_said);
                self.acknowledged = self.received;
            }
            // The next message reuses the number.
            (Err(_), true) => drop(self.kept.remove(self.sent)),
            (Err(_), false) => {}
        }
        framed.map(Some)
    }

    /// Records the numbers of a received frame and classifies it.
    pub fn receive(&mut self, seq: u64, ack: u64) -> Received {
        self.forget(ack);
        if seq == 0 || seq <= self.received {
            return Received::Repeated;
        }
        if seq != self.received + 1 {
            return Received::Gap;
        }
        self.received = seq;
        Received::New
    }

    /// Resumes the conversation on a new connection to the same end, which has received messages up to `other_received`.
    pub fn resume(&mut self, other_received: u64) {
        self.forget(other_received);
        (self.sent, self.acknowledged) = (0, self.received);
    }

    /// Restarts the conversation with an end that knows only a `hello` sent at [`Conversation::position`] `told`.
    pub fn restart(&mut self, told: u64) {
        self.forget(told.saturating_sub(1));
        *self = Conversation { kept: std::mem::take(&mut self.kept), ..Conversation::default() };
    }

    fn forget(&mut self, ack: u64) {
        while self.first <= ack && self.kept.pop_front().is_some() {
            self.first += 1;
            self.sent = self.sent.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Frames, ToAgent};

    fn said(number: u64) -> ToAgent {
        ToAgent::Want { deadline_ms: Some(number) }
    }

    #[test]
    fn a_message_that_is_too_long_is_given_up_and_the_next_one_has_its_number() {
        let mut speaker = Conversation::default();
        let said = |text: &str| std::collections::BTreeMap::from([("text", text.to_owned())]);
        for text in ["one", &"x".repeat(1 << 20), "two"] {
            speaker.push(said(text));
        }
        let ack = || said("");
        assert!(speaker.next(ack()).unwrap().is_some());
        assert!(matches!(speaker.next(ack()), Err(FrameError::TooLong { .. })));
        assert!(speaker.next(ack()).unwrap().is_some());
        assert_eq!((speaker.position(), speaker.unacknowledged()), (3, 2));
        assert!(speaker.next(ack()).unwrap().is_none());
        // Resent after a lost connection, without the descriptor.
        speaker.resume(1);
        assert!(speaker.next(ack()).unwrap().is_some());
        assert!(speaker.next(ack()).unwrap().is_none());
    }

    /// Decodes all frames that one end sends.
    fn heard(speaker: &mut Conversation<ToAgent>) -> Vec<Envelope<ToAgent>> {
        let mut frames = Frames::default();
        std::iter::from_fn(|| {
            frames.push(&speaker.next(ToAgent::Ack).unwrap()?);
            frames.take().unwrap()
        })
        .collect()
    }

    proptest! {
        /// Each message arrives once and in order, whatever a lost connection drops.
        #[test]
        fn each_message_is_received_once(steps in prop::collection::vec((0_u8..4, 0_usize..5), 1..200)) {
            let (mut worker, mut agent) = (Conversation::default(), Conversation::<ToAgent>::default());
            let (mut pushed, mut dealt_with) = (0, Vec::new());
            let mut deliver = |worker: &mut Conversation<ToAgent>, agent: &mut Conversation<ToAgent>, most| {
                let frames = heard(worker);
                for Envelope { seq, ack, message, .. } in frames.into_iter().take(most) {
                    match (agent.receive(seq, ack), message) {
                        (Received::New, ToAgent::Want { deadline_ms: Some(number) }) => dealt_with.push(number),
                        (Received::New, _) => panic!("nothing else was said"),
                        (Received::Gap, _) => panic!("a gap within a connection"),
                        (Received::Repeated, _) => {}
                    }
                }
            };
            for (what, most) in steps {
                match what {
                    0 => { pushed += 1; worker.push(said(pushed)); }
                    // Every frame arrives.
                    1 => deliver(&mut worker, &mut agent, usize::MAX),
                    2 => heard(&mut agent).into_iter().for_each(|heard| { worker.receive(heard.seq, heard.ack); }),
                    // The connection breaks after a few frames.
                    _ => {
                        deliver(&mut worker, &mut agent, most);
                        worker.resume(agent.received());
                        agent.resume(worker.received());
                    }
                }
            }
            worker.resume(agent.received());
            deliver(&mut worker, &mut agent, usize::MAX);
            prop_assert_eq!(dealt_with, (1..=pushed).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_new_agent_receives_messages_queued_after_hello() {
        let mut worker = Conversation::default();
        (1..=3).for_each(|number| worker.push(said(number)));
        assert_eq!(heard(&mut worker).len(), 3);
        worker.receive(1, 1);
        let told = worker.position();
        worker.push(said(4));
        worker.restart(told);
        let frames = heard(&mut worker);
        assert_eq!(frames.iter().map(|frame| (frame.seq, frame.ack)).collect::<Vec<_>>(), [(1, 0)]);
        assert_eq!(frames[0].message, said(4));
        assert_eq!((worker.receive(1, 1), worker.unacknowledged()), (Received::New, 0));
    }

    #[test]
    fn received_messages_are_acknowledged_once() {
        let mut agent = Conversation::<ToAgent>::default();
        assert_eq!(agent.receive(1, 0), Received::New);
        assert_eq!(agent.receive(1, 0), Received::Repeated);
        assert_eq!(agent.receive(3, 0), Received::Gap);
        let frames = heard(&mut agent);
        assert_eq!((frames.len(), frames[0].seq, frames[0].ack, frames[0].message.is_ack()), (1, 0, 1, true));
    }
}
