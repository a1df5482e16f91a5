//! Helper threads for work of a call. They are started on first use and sleep while idle.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

/// Work that several threads share until none is left.
pub(crate) trait Work: Send + Sync {
    fn help(&self);
}

/// Pool of helper threads in addition to the calling ones.
pub(crate) struct Threads {
    most: usize,
    running: Mutex<Option<Running>>,
}

struct Running {
    orders: Sender<Arc<dyn Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(crate) fn new(most: usize) -> Threads {
        Threads { most, running: Mutex::new(None) }
    }

    /// Wakes up to `helpers` threads and shares the work with them. If the system refuses threads, the caller does all of it.
    pub(crate) fn call(&self, work: &Arc<dyn Work>, helpers: usize) {
        if self.most == 0 {
            return;
        }
        let mut running = self.running.lock();
        let running = running.get_or_insert_with(|| start(self.most));
        for _ in 0..helpers.min(running.threads.len()) {
            // The receivers live as long as the threads.
            let _ = running.orders.send(work.clone());
        }
    }

    /// Stops the threads and waits for their end.
    pub(crate) fn stop(&self) {
        let Some(Running { orders, threads }) = self.running.lock().take() else { return };
        drop(orders);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("most", &self.most).finish_non_exhaustive()
    }
}

fn start(count: usize) -> Running {
    let (orders, inbox) = unbounded::<Arc<dyn Work>>();
    let spawn = |index| {
        let inbox: Receiver<Arc<dyn Work>> = inbox.clone();
        let thread = std::thread::Builder::new().name(format!("glake-pageable-{index}"));
        thread.spawn(move || inbox.iter().for_each(|work| work.help()))
    };
    let threads = (0..count).map_while(|index| match spawn(index) {
        Ok(thread) => Some(thread),
        Err(error) => {
            tracing::warn!(target: "glake::transfer", %error, "pageable copies have fewer threads");
            None
        }
    });
    Running { orders, threads: threads.collect() }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct Meeting {
        all: Barrier,
        came: AtomicU32,
    }

    impl Work for Meeting {
        fn help(&self) {
            self.all.wait();
            self.came.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn all_threads_help_at_a_time_and_end_with_their_owner() {
        let threads = Threads::new(3);
        for _ in 0..2 {
            let meeting = Arc::new(Meeting { all: Barrier::new(4), came: AtomicU32::new(0) });
            let work: Arc<dyn Work> = meeting.clone();
            // More are asked for than there are.
            threads.call(&work, 9);
            work.help();
            while Arc::strong_count(&meeting) > 2 {
                std::thread::yield_now();
            }
            assert_eq!(meeting.came.load(Ordering::Relaxed), 4);
        }
        drop(threads);
        let nobody = Threads::new(0);
        let meeting: Arc<dyn Work> = Arc::new(Meeting { all: Barrier::new(2), came: AtomicU32::new(0) });
        nobody.call(&meeting, 5);
        assert_eq!(Arc::strong_count(&meeting), 1);
    }
}
