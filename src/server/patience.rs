//! A call must have arrived in time; one that has is answered at once.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::Service;

/// How long a caller may take to send its request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);

/// Ends calls whose answer takes too long to begin.
#[derive(Clone)]
pub(super) struct Patience<S>(pub(super) S);

impl<S, B> Service<Request<B>> for Patience<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Patient<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Patient {
            answer: self.0.call(request),
            limit: None,
        }
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
