//! How long a caller waits: the `grpc-timeout` header.
//!
//! A call whose caller has given up is not decided, so that nothing is charged for an answer that nobody reads.
//! See <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>.

use std::time::Duration;

use crate::clock::Timestamp;

/// When a caller gives up, on the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Duration);

impl Deadline {
    /// The deadline of a call that arrived at `now` with this `grpc-timeout`. `None` if the header is malformed.
    pub fn new(grpc_timeout: &str, now: Timestamp) -> Option<Self> {
        now.monotonic.checked_add(parse(grpc_timeout)?).map(Deadline)
    }

    /// Whether the caller has given up.
    pub fn has_passed(&self, now: Timestamp) -> bool {
        now.monotonic >= self.0
    }
}

/// One to eight digits and a unit.
fn parse(grpc_timeout: &str) -> Option<Duration> {
    let (digits, unit) = grpc_timeout.split_at_checked(grpc_timeout.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3_600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_have_one_to_eight_digits_and_a_unit() {
        #[track_caller]
        fn test(grpc_timeout: &str, expected: Option<Duration>) {
            assert_eq!(parse(grpc_timeout), expected, "{grpc_timeout}");
        }
        test("20m", Some(Duration::from_millis(20)));
        test("0m", Some(Duration::ZERO));
        test("99999999H", Some(Duration::from_secs(99_999_999 * 3_600)));
        test("1u", Some(Duration::from_micros(1)));
        test("1n", Some(Duration::from_nanos(1)));
        test("2S", Some(Duration::from_secs(2)));
        test("3M", Some(Duration::from_secs(180)));
        for malformed in ["", "m", "123456789m", "1x", "-1m", "1 m", "1é", "20"] {
            test(malformed, None);
        }
    }

    #[test]
    fn it_passes_at_the_instant_itself() {
        let at = |monotonic| Timestamp {
            since_epoch: Duration::ZERO,
            monotonic,
        };
        let deadline = Deadline::new("20m", at(Duration::from_secs(1))).unwrap();
        assert!(!deadline.has_passed(at(Duration::from_micros(1_019_999))));
        assert!(deadline.has_passed(at(Duration::from_millis(1_020))));
        assert!(
            Deadline::new("0m", at(Duration::ZERO))
                .unwrap()
                .has_passed(at(Duration::ZERO))
        );
    }
}
