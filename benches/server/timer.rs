//! A timer to the microsecond: those of tokio are to the millisecond, which is longer than most calls take.

use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::time::Instant;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub(crate) struct Timer(AsyncFd<Descriptor>);

struct Descriptor(TimerFd);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Timer {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK)?;
        #[allow(deprecated)]
        // what is advised instead is unsafe, which this is not: the timer owns its descriptor
        let timer = AsyncFd::with_interest(Descriptor(timer), Interest::READABLE)?;
        Ok(Timer(timer))
    }

    /// Waits until `due`; if that has passed, not at all.
    pub(crate) async fn until(&self, due: Instant) -> anyhow::Result<()> {
        let wait = due.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            return Ok(());
        }
        let once = Expiration::OneShot(TimeSpec::from_duration(wait));
        self.0.get_ref().0.set(once, TimerSetTimeFlags::empty())?;
        loop {
            let mut ready = self.0.readable().await?;
            if ready.try_io(|timer| Ok(timer.get_ref().0.wait()?)).is_ok() {
                return Ok(());
            }
        }
    }
}
