//! Locks of the gate and the process's tables: parking_lot's. In the crate `glake-schedules`, which compiles this source with
//! `cfg(schedules)` for tests only, a scheduler (shuttle) owns them. It runs one thread at a time and chooses the next one at every lock,
//! so that tests see thousands of schedules.

#[cfg(not(schedules))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
#[cfg(schedules)]
pub(crate) use scheduled::{Condvar, Mutex, MutexGuard, RwLock};

/// Runs a test's threads in `GLAKE_SCHEDULES` schedules (default 20,000): half of them random, half with few changes of thread.
#[cfg(test)]
#[cfg(schedules)]
pub(crate) fn schedules(test: impl Fn() + Send + Sync + Clone + 'static) {
    let many =
        std::env::var("GLAKE_SCHEDULES").ok().and_then(|many| many.parse().ok()).unwrap_or(20_000_usize);
    shuttle::check_random(test.clone(), many.div_ceil(2));
    shuttle::check_pct(test, many / 2, 3);
}

/// Adapter with parking_lot's interface for shuttle's locks.
#[cfg(schedules)]
mod scheduled {
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::{Duration, Instant};

    use shuttle::sync;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    /// Lock guard; empty only while it waits for a condition.
    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T>(&'a sync::Mutex<T>, Option<sync::MutexGuard<'a, T>>);

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(sync::Condvar);

    #[derive(Debug, Default)]
    pub(crate) struct RwLock<T>(sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn read(&self) -> sync::RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(&self.0, Some(locked(&self.0)))
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Condvar {
        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            if let Some(held) = guard.1.take() {
                guard.1 = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
            }
        }

        /// Yields to other threads and reports a timeout, because shuttle has no clock.
        pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _end: Instant) -> bool {
            guard.1 = None;
            shuttle::thread::yield_now();
            guard.1 = Some(locked(guard.0));
            true
        }

        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _time: Duration) -> bool {
            self.wait_until(guard, Instant::now())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    fn locked<T>(mutex: &sync::Mutex<T>) -> sync::MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        #[allow(clippy::expect_used)]
        fn deref(&self) -> &T {
            self.1.as_ref().expect("a guard that waits is borrowed by its wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        #[allow(clippy::expect_used)]
        fn deref_mut(&mut self) -> &mut T {
            self.1.as_mut().expect("a guard that waits is borrowed by its wait")
        }
    }
}
