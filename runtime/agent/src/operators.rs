//! Requests of operators: `glake ps`, `shrink`, `refill`, `start`, `stop`, `explain`.

use std::io;
use std::rc::Rc;

use glake_arbiter::WorkerId;
use glake_wire::{Answer, Ask, Envelope, frame};

use crate::Agent;
use crate::link::Connection;
use crate::rows::Progress;
use crate::server::Server;

/// Maximum size of a text in one frame.
const PART: usize = 16 << 10;

/// Answers a request completely.
pub(crate) async fn answer(server: &Rc<Server>, ask: Ask, connection: &mut Connection) -> io::Result<()> {
    let answers = match ask {
        Ask::Ps => {
            server.look();
            let mut rows = server.ask(Agent::rows);
            rows.extend(server.child_rows());
            rows.sort_by(|a, b| a.worker.cmp(&b.worker));
            whole(rows.into_iter().map(Answer::Row))
        }
        Ask::Explain => whole(server.ask(Agent::decisions).into_iter().map(Answer::Decision)),
        Ask::Metrics => {
            server.look();
            let text: Vec<char> = server.ask(crate::metrics::text).chars().collect();
            whole(text.chunks(PART).map(|part| Answer::Text { text: part.iter().collect() }))
        }
        Ask::Shrink { worker } => {
            let done = tokio::select! {
                done = shrink(server, &worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
        Ask::Refill { worker } => {
            let done = tokio::select! {
                done = refill(server, &worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
        Ask::Start { worker } => {
            let done = tokio::select! {
                done = server.start_worker(&worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
        Ask::Stop { worker } => {
            let done = tokio::select! {
                done = server.stop_worker(&worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
    };
    for answer in answers {
        let bytes = frame(&Envelope::unnumbered(answer)).map_err(io::Error::other)?;
        connection.say(bytes).await?;
    }
    Ok(())
}

fn whole(answers: impl Iterator<Item = Answer>) -> Vec<Answer> {
    answers.chain([Answer::End]).collect()
}

fn told(done: Result<(), String>) -> Answer {
    done.map_or_else(|why| Answer::Error { why }, |()| Answer::End)
}

async fn shrink(server: &Rc<Server>, name: &str) -> Result<(), String> {
    let id = server.ask(|agent| agent.find(name))?;
    loop {
        let change = server.change();
        if server.ask(|agent| agent.may_shrink(id))? {
            break;
        }
        change.await;
    }
    server.look();
    server.tell(|agent, now| agent.ask_to_shrink(id, now));
    finish(server, id, name, Agent::shrink_progress).await
}

async fn refill(server: &Rc<Server>, name: &str) -> Result<(), String> {
    if server.is_startable(name) {
        server.start_worker(name).await?;
    }
    let id = server.ask(|agent| agent.find(name))?;
    server.tell(|agent, now| agent.ask_to_refill(id, now))?;
    finish(server, id, name, Agent::refill_progress).await
}

async fn finish(
    server: &Rc<Server>,
    id: WorkerId,
    name: &str,
    progress: impl Fn(&Agent, WorkerId) -> Progress,
) -> Result<(), String> {
    loop {
        let change = server.change();
        match server.ask(|agent| progress(agent, id)) {
            Progress::Done => return Ok(()),
            Progress::Failed(why) => return Err(format!("{name}: {why}")),
            Progress::UnderWay => change.await,
        }
    }
}
