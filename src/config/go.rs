//! How Go's standard library reads numbers, truth values and durations: what YAML files and environment variables of
//! envoyproxy/ratelimit were written for.

use std::time::Duration;

/// An integer with base 0: decimal, `0x`, `0o`, `0b`, and octal with a leading zero. Magnitudes of more than 64 bits are
/// none.
pub(crate) fn integer(text: &str) -> Option<i128> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (base, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', b'o' | b'O', ..] => (8, &digits[2..]),
        [b'0', b'b' | b'B', ..] => (2, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    // The parser below would take a second sign.
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let magnitude = i128::from(u64::from_str_radix(digits, base).ok()?);
    Some(if negative { -magnitude } else { magnitude })
}

/// `1`, `t`, `T`, `true`, `True`, `TRUE` and their opposites; nothing else.
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "True" | "TRUE" => Some(true),
        "0" | "f" | "F" | "false" | "False" | "FALSE" => Some(false),
        _ => None,
    }
}

/// A duration that is not negative: `0`, or numbers with units such as `1h30m`, `1.5s`, `300ms`.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (count, after) = rest.split_at(number);
        let unit = after
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(unit);
        let seconds = match unit {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            _ => return None,
        };
        let part = Duration::try_from_secs_f64(count.parse::<f64>().ok()? * seconds).ok()?;
        total = total.checked_add(part)?;
        rest = after;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_numbers_with_units() {
        #[track_caller]
        fn test(text: &str, expected: Option<Duration>) {
            assert_eq!(duration(text), expected, "{text}");
        }
        test("0", Some(Duration::ZERO));
        test("10s", Some(Duration::from_secs(10)));
        test("1h30m", Some(Duration::from_secs(5_400)));
        test("1.5s", Some(Duration::from_millis(1_500)));
        test("300ms", Some(Duration::from_millis(300)));
        test("2us3ns", Some(Duration::from_nanos(2_003)));
        for wrong in [
            "",
            "10",
            "s",
            "-1s",
            "1d",
            "1s2",
            "1..5s",
            "99999999999999999999h",
        ] {
            test(wrong, None);
        }
    }

    #[test]
    fn a_second_sign_is_no_number() {
        assert_eq!(integer("-5"), Some(-5));
        assert_eq!(integer("0x1F"), Some(31));
        assert_eq!(integer("0"), Some(0));
        for wrong in ["", "-", "--5", "0x-1", "0+1", "5 ", "1_0", "36893488147419103232"] {
            assert_eq!(integer(wrong), None, "{wrong}");
        }
    }
}
