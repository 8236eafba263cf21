//! Taking samples: CUDA events on a GPU, a monotonic clock on the CPU.
//!
//! A GPU sample is the time between two events around several calls. Before the first event the
//! stream is given memory to clear, for longer than the host takes to queue the calls: they then
//! follow one another without a gap, and what the host does is not in the sample. It is measured
//! apart. The memory is larger than the second-level cache, which it leaves cold.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DriverError};
use ferroflash::Device;

use super::statistics::median;
use crate::failure::{Failure, Result};

/// Bytes that are cleared before a sample, at least.
const LEAD_BYTES: usize = 256 << 20;
/// Clears before a sample at most.
const MOST_LEAD: u32 = 256;

/// Calls to time.
pub(super) type Call<'c> = &'c mut dyn FnMut() -> Result<()>;

/// A clock.
pub(super) enum Timer {
    /// The host's.
    Host,
    /// The device's.
    Events(Box<Events>),
}

/// Events of a stream.
pub(super) struct Events {
    stream: Arc<CudaStream>,
    start: CudaEvent,
    end: CudaEvent,
    cleared: CudaSlice<u8>,
    clear_ms: f64,
    /// Clears before a sample.
    lead: u32,
}

/// One sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Milliseconds of all its calls.
    pub(super) ms: f64,
    /// Milliseconds in which the host queued them.
    pub(super) host_ms: f64,
}

/// A fault of the driver, by the function that it came from.
pub(super) fn driver(call: &str) -> impl FnOnce(DriverError) -> Failure {
    move |error| Failure::Run(format!("{call}: {error}"))
}

impl Timer {
    /// A clock for work on the device's default stream.
    pub(super) fn new(device: &Device) -> Result<Self> {
        let (Some(context), Some(limits)) = (device.context(), device.limits()) else {
            return Ok(Self::Host);
        };
        let stream = context.default_stream();
        let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let bytes = LEAD_BYTES.max(usize::try_from(limits.l2_bytes).unwrap_or(0) * 2);
        let mut events = Events {
            start: event().map_err(driver("cuEventCreate"))?,
            end: event().map_err(driver("cuEventCreate"))?,
            cleared: stream.alloc_zeros(bytes).map_err(driver("cuMemAlloc"))?,
            stream,
            clear_ms: 1.0,
            lead: 0,
        };
        let clears: Result<Vec<f64>> = (0..5)
            .map(|_| {
                events.start.record(&events.stream).map_err(driver("cuEventRecord"))?;
                events.clear()?;
                events.end.record(&events.stream).map_err(driver("cuEventRecord"))?;
                events.elapsed()
            })
            .collect();
        events.clear_ms = median(&clears?).max(1e-3);
        Ok(Self::Events(Box::new(events)))
    }

    /// How a sample is taken, in words.
    pub(super) const fn method(&self) -> &'static str {
        match self {
            Self::Host => {
                "monotonic clock around calls on warm tensors; pseudo-random normal inputs"
            }
            Self::Events(_) => {
                "CUDA events around calls that were queued behind other work, so that the host's \
                 time is not in them; tensors in turn, together larger than twice the \
                 second-level cache where calls allow it; pseudo-random normal inputs"
            }
        }
    }

    /// What a sample should last, in milliseconds, so that the clock's own time is nothing.
    pub(super) const fn aim_ms(&self) -> f64 {
        match self {
            Self::Host => 2.0,
            Self::Events(_) => 4.0,
        }
    }

    /// Calls of a sample at most: a queue holds about a thousand launches.
    pub(super) const fn most_calls(&self) -> u32 {
        match self {
            Self::Host => 10_000,
            Self::Events(_) => 100,
        }
    }

    /// Readies the stream for samples that take the host `host_ms` to queue.
    pub(super) fn expect(&mut self, host_ms: f64) {
        if let Self::Events(events) = self {
            let clears = (1.5 * host_ms / events.clear_ms).ceil() as u32 + 1;
            events.lead = clears.min(MOST_LEAD);
        }
    }

    /// Times `calls` calls; `meanwhile` runs while the device may still be at them.
    pub(super) fn sample(
        &mut self,
        calls: u32,
        call: Call<'_>,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Sample> {
        let Self::Events(events) = self else {
            let begun = Instant::now();
            for _ in 0..calls {
                call()?;
            }
            let ms = begun.elapsed().as_secs_f64() * 1e3;
            meanwhile();
            return Ok(Sample { ms, host_ms: ms });
        };
        for _ in 0..events.lead {
            events.clear()?;
        }
        events.start.record(&events.stream).map_err(driver("cuEventRecord"))?;
        let begun = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        let host_ms = begun.elapsed().as_secs_f64() * 1e3;
        events.end.record(&events.stream).map_err(driver("cuEventRecord"))?;
        meanwhile();
        Ok(Sample { ms: events.elapsed()?, host_ms })
    }

    /// Median of samples without work, in milliseconds.
    pub(super) fn empty_ms(&mut self) -> Result<f64> {
        let samples: Result<Vec<f64>> =
            (0..21).map(|_| Ok(self.sample(1, &mut || Ok(()), &mut || ())?.ms)).collect();
        Ok(median(&samples?))
    }
}

impl Events {
    fn clear(&mut self) -> Result<()> {
        self.stream.memset_zeros(&mut self.cleared).map_err(driver("cuMemsetD8Async"))
    }

    fn elapsed(&self) -> Result<f64> {
        let ms = self.start.elapsed_ms(&self.end).map_err(driver("cuEventElapsedTime"))?;
        Ok(f64::from(ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_hold_their_calls() {
        let mut timer = Timer::new(&Device::cpu()).expect("a clock");
        let (mut calls, mut asides) = (0, 0);
        let mut call = || {
            calls += 1;
            std::thread::sleep(std::time::Duration::from_millis(2));
            Ok(())
        };
        let sample = timer.sample(3, &mut call, &mut || asides += 1).expect("no fault");
        assert!(sample.ms >= 6.0, "{sample:?}");
        assert_eq!((calls, asides), (3, 1));
        assert!(timer.empty_ms().expect("no fault") < 1.0);
        let failed = timer.sample(1, &mut || Err(Failure::Run("no".to_owned())), &mut || ());
        assert!(failed.is_err());
    }
}
