//! `strftime_now`: the date as templates print it, in UTC.
//!
//! A server's local time zone is not a property of a request, so it is ignored here, unlike in the reference. Only the directives of C's
//! `strftime` in the default locale are supported; other directives are printed unchanged.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::Environment;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Registers the function.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function("strftime_now", |format: &str| {
        // A clock before 1970 is not set.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        strftime(format, now)
    });
}

/// The calendar fields of a moment.
struct Moment {
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    day_of_year: u64,
    /// Days since Sunday.
    weekday: u64,
    second_of_day: u64,
}

impl Moment {
    fn new(seconds: u64) -> Self {
        let days = seconds / 86_400;
        let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let mut year = 1970;
        let mut rest = days;
        while rest >= 365 + u64::from(leap(year)) {
            rest -= 365 + u64::from(leap(year));
            year += 1;
        }
        let day_of_year = rest + 1;
        let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 1;
        for length in lengths {
            if rest < length {
                break;
            }
            rest -= length;
            month += 1;
        }
        Self { year, month, day: rest + 1, day_of_year, weekday: (days + 4) % 7, second_of_day: seconds % 86_400 }
    }
}

/// Formats the moment `seconds` after the beginning of 1970, in UTC; years beyond 9999 are 9999.
pub fn strftime(format: &str, seconds: u64) -> String {
    // For years beyond 9999 the loop over years would only take time.
    let moment = Moment::new(seconds.min(253_402_300_799));
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let Some(directive) = directive else {
            out.push('%');
            break;
        };
        let start = out.len();
        write_directive(&mut out, directive, &moment);
        if unpadded {
            let digits = out[start..].trim_start_matches('0').to_owned();
            out.truncate(start);
            out.push_str(if digits.is_empty() { "0" } else { &digits });
        }
    }
    out
}

fn write_directive(out: &mut String, directive: char, m: &Moment) {
    let (hour, minute, second) = (m.second_of_day / 3600, m.second_of_day / 60 % 60, m.second_of_day % 60);
    let month = MONTHS[(m.month as usize - 1).min(11)];
    let day = DAYS[m.weekday as usize];
    let hour12 = (hour + 11) % 12 + 1;
    // Writing to a string cannot fail.
    let _ = match directive {
        'Y' => write!(out, "{}", m.year),
        'y' => write!(out, "{:02}", m.year % 100),
        'm' => write!(out, "{:02}", m.month),
        'd' => write!(out, "{:02}", m.day),
        'e' => write!(out, "{:2}", m.day),
        'j' => write!(out, "{:03}", m.day_of_year),
        'B' => out.write_str(month),
        'b' | 'h' => out.write_str(&month[..3]),
        'A' => out.write_str(day),
        'a' => out.write_str(&day[..3]),
        'w' => write!(out, "{}", m.weekday),
        'H' => write!(out, "{hour:02}"),
        'I' => write!(out, "{hour12:02}"),
        'M' => write!(out, "{minute:02}"),
        'S' => write!(out, "{second:02}"),
        'p' => out.write_str(if hour < 12 { "AM" } else { "PM" }),
        'F' => write!(out, "{}-{:02}-{:02}", m.year, m.month, m.day),
        'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
        'Z' => out.write_str("UTC"),
        'z' => out.write_str("+0000"),
        'n' => out.write_char('\n'),
        't' => out.write_char('\t'),
        '%' => out.write_char('%'),
        other => write!(out, "%{other}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(strftime("%A, %-d %B %Y %H:%M:%S", 1_709_210_096), "Thursday, 29 February 2024 12:34:56");
        assert_eq!(strftime("%Y-%m-%d %j %I %p %%%Q", 1_735_689_599), "2024-12-31 366 11 PM %%Q");
        assert_eq!(strftime("%a%", 1_735_689_600), "Wed%");
    }
}
