//! What calls are made of, and connections to make them on.

use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::transport::{Channel, Endpoint};

use crate::request::request;

pub(crate) type Client = RateLimitServiceClient<Channel>;

/// A connection of its own.
pub(crate) async fn connect(port: u16) -> Client {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).expect("it is an address");
    RateLimitServiceClient::new(endpoint.connect().await.expect("the server accepts connections"))
}

/// A call with one descriptor of one entry for each value.
pub(crate) fn call(key: &'static str, values: impl IntoIterator<Item = String>) -> RateLimitRequest {
    request(values.into_iter().map(|value| vec![(key, value)]))
}

/// Whether the call was refused.
pub(crate) async fn is_refused(client: &mut Client, call: RateLimitRequest) -> bool {
    is_over_limit(&ask(client, call).await)
}

pub(crate) async fn ask(client: &mut Client, call: RateLimitRequest) -> RateLimitResponse {
    let answer = client.should_rate_limit(call).await;
    answer.expect("the server decides").into_inner()
}

pub(crate) fn is_over_limit(answer: &RateLimitResponse) -> bool {
    answer.overall_code == Code::OverLimit as i32
}
