//! A call must have arrived in time, and those that have not may hold only so much; one that has is answered at once.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{BoxError, Service};

/// How much of large requests may have arrived in all calls together, in bytes. More are refused.
const MOST_WAITING_BYTES: u64 = 64 << 20;

/// A request is large from so many bytes on. Smaller ones are not counted: of them only so many can be open.
const LARGE: u64 = 4_096;

/// How long a caller may take to send its request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);

/// Ends calls whose answer takes too long to begin, and those that would hold too much.
#[derive(Clone)]
pub(super) struct Patience<S> {
    service: S,
    /// What has arrived of the large requests of all connections.
    waiting: Arc<AtomicU64>,
}

impl<S> Patience<S> {
    pub(super) fn new(service: S, waiting: Arc<AtomicU64>) -> Self {
        Patience { service, waiting }
    }
}

impl<S, B> Service<Request<B>> for Patience<S>
where
    S: Service<Request<Counted<B>>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Patient<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let request = request.map(|body| Counted {
            body,
            counter: Counter {
                arrived: 0,
                waiting: Arc::clone(&self.waiting),
            },
        });
        Patient {
            answer: self.service.call(request),
            limit: None,
        }
    }
}

pin_project! {
    /// The body of a request, of which what has arrived is counted.
    pub(super) struct Counted<B> {
        #[pin]
        body: B,
        counter: Counter,
    }
}

/// What has arrived of a request. Gives back what it has counted when the request is gone.
struct Counter {
    arrived: u64,
    waiting: Arc<AtomicU64>,
}

impl Counter {
    /// Counts what has arrived. An error if all calls together hold too much.
    fn count(&mut self, bytes: u64) -> Result<(), Status> {
        let counted = self.counted();
        self.arrived += bytes;
        let more = self.counted() - counted;
        if more > 0 && self.waiting.fetch_add(more, Ordering::Relaxed) + more > MOST_WAITING_BYTES {
            return Err(Status::resource_exhausted(
                "too much has arrived of calls that are not complete",
            ));
        }
        Ok(())
    }

    fn counted(&self) -> u64 {
        self.arrived.saturating_sub(LARGE)
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        if self.counted() > 0 {
            self.waiting.fetch_sub(self.counted(), Ordering::Relaxed);
        }
    }
}

impl<B> HttpBody for Counted<B>
where
    B: HttpBody<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        let frame = ready!(this.body.poll_frame(context));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(Into::into)?;
            if let Some(data) = frame.data_ref() {
                this.counter.count(data.len() as u64)?;
            }
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pin_project! {
    /// An answer, as long as there is patience for it.
    pub(super) struct Patient<F> {
        #[pin]
        answer: F,
        // A timer only for calls that have to wait: most are answered when first polled.
        limit: Option<Pin<Box<Sleep>>>,
    }
}

impl<F, E> Future for Patient<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if let Poll::Ready(answer) = this.answer.poll(context) {
            return Poll::Ready(answer);
        }
        let limit = this
            .limit
            .get_or_insert_with(|| Box::pin(sleep(REQUEST_PATIENCE)));
        ready!(limit.as_mut().poll(context));
        Poll::Ready(Ok(Status::deadline_exceeded(
            "the request did not arrive in time",
        )
        .into_http()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_large_requests_hold_is_bounded_and_given_back() {
        let waiting = Arc::new(AtomicU64::default());
        let counter = || Counter {
            arrived: 0,
            waiting: Arc::clone(&waiting),
        };
        let mut small = counter();
        small.count(LARGE).unwrap();
        assert_eq!(waiting.load(Ordering::Relaxed), 0);
        let mut large: Vec<Counter> = (0..8).map(|_| counter()).collect();
        for counter in &mut large {
            counter.count(1_000).unwrap();
            counter.count(MOST_WAITING_BYTES / 8).unwrap();
        }
        // Each had its first bytes for nothing.
        let room = 8 * (LARGE - 1_000);
        let mut last = counter();
        last.count(LARGE + room).unwrap();
        assert!(last.count(1).is_err());
        drop((large, last));
        assert_eq!(waiting.load(Ordering::Relaxed), 0);
    }
}
