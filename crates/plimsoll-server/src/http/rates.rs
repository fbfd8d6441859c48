//! Rate limits of each client: requests and tokens per minute, in buckets that fill evenly.
//!
//! A client is an API key or, on a server without keys, an address (of IPv6 the network's 64 bits). Keys are known beforehand. When there
//! are too many addresses, the one unused for longest is dropped, in its client's favour. Tokens are charged as they are used, so running
//! requests may take a bucket below zero. Below zero, new requests are refused.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::http::error::ApiError;

/// The limits of one client for a minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests that use the model.
    pub requests: Option<u32>,
    /// Tokens of prompts and outputs together.
    pub tokens: Option<u64>,
}

/// The most addresses that are remembered at once.
pub(crate) const ADDRESSES_MAX: usize = 4096;

/// Heap bytes of one remembered client.
pub(crate) const CLIENT_BYTES: u64 = 256;

/// The client that a request is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClientId {
    /// The number of a key.
    Key(usize),
    /// The address of a client, on a server without keys.
    Address(IpAddr),
}

impl ClientId {
    /// An address stands for its network: a client with one IPv6 address usually has 2^64 of them.
    pub fn address(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => Self::Address(Ipv6Addr::from(u128::from(address) & !u128::from(u64::MAX)).into()),
            address => Self::Address(address),
        }
    }
}

/// A bucket, which fills evenly up to its limit.
#[derive(Debug)]
struct Bucket {
    limit: f64,
    left: f64,
    at: Instant,
}

impl Bucket {
    fn new(limit: f64, now: Instant) -> Self {
        Self { limit, left: limit, at: now }
    }

    fn fill(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + seconds * self.limit / 60.0).min(self.limit);
        self.at = now;
    }

    /// Returns the time until the bucket holds `amount`.
    fn wait(&self, amount: f64) -> Duration {
        Duration::from_secs_f64(((amount.min(self.limit) - self.left).max(0.0) * 60.0 / self.limit).min(86_400.0))
    }
}

/// One client's buckets.
#[derive(Debug)]
pub(crate) struct RateBuckets(Mutex<Buckets>);

#[derive(Debug)]
struct Buckets {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    seen: Instant,
}

impl RateBuckets {
    fn new(limits: RateLimits, now: Instant) -> Arc<Self> {
        let requests = limits.requests.map(|limit| Bucket::new(f64::from(limit), now));
        let tokens = limits.tokens.map(|limit| Bucket::new(limit as f64, now));
        Arc::new(Self(Mutex::new(Buckets { requests, tokens, seen: now })))
    }

    fn buckets(&self, now: Instant) -> MutexGuard<'_, Buckets> {
        // Only numbers are assigned under the lock, so a poisoned lock still guards valid ones.
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Buckets { requests, tokens, seen } = &mut *buckets;
        requests.iter_mut().chain(tokens).for_each(|bucket| bucket.fill(now));
        *seen = now;
        buckets
    }

    /// Takes one request, if neither bucket is empty.
    pub fn take_request(&self, now: Instant) -> Result<(), ApiError> {
        let mut buckets = self.buckets(now);
        if let Some(tokens) = buckets.tokens.as_ref().filter(|tokens| tokens.left < 1.0) {
            return Err(refused("tokens", "--rate-limit-tokens", tokens));
        }
        match &mut buckets.requests {
            Some(requests) if requests.left < 1.0 => Err(refused("requests", "--rate-limit-requests", requests)),
            Some(requests) => {
                requests.left -= 1.0;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Charges tokens that were used.
    pub fn charge(&self, tokens: u64) {
        if let Some(bucket) = &mut self.buckets(Instant::now()).tokens {
            bucket.left -= tokens as f64;
        }
    }

    /// Adds the remaining amounts to an answer's head.
    pub fn mark(&self, headers: &mut HeaderMap) {
        let buckets = self.buckets(Instant::now());
        for (bucket, names) in [(&buckets.requests, REQUESTS), (&buckets.tokens, TOKENS)] {
            let Some(bucket) = bucket else { continue };
            let reset = format!("{:.3}s", bucket.wait(bucket.limit).as_secs_f64());
            let values = [format!("{:.0}", bucket.limit), format!("{:.0}", bucket.left.max(0.0).floor()), reset];
            for (name, value) in names.into_iter().zip(values) {
                // Digits and a letter: always a valid header value.
                headers.extend(HeaderValue::try_from(value).ok().map(|value| (HeaderName::from_static(name), value)));
            }
        }
    }
}

const REQUESTS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const TOKENS: [&str; 3] = ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];

fn refused(what: &str, flag: &str, bucket: &Bucket) -> ApiError {
    let wait = bucket.wait(1.0);
    let message = format!(
        "the limit of {:.0} {what} per minute is reached ({flag}); try again in {:.1} s",
        bucket.limit,
        wait.as_secs_f64()
    );
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message);
    let retry_after_s = Some(wait.as_secs_f64().ceil().max(1.0) as u32);
    ApiError { close: true, code: Some("rate_limit_exceeded"), retry_after_s, ..error }
}

/// The buckets of all clients.
pub(crate) struct Rates {
    limits: RateLimits,
    clients: Mutex<HashMap<ClientId, Arc<RateBuckets>>>,
}

impl Rates {
    pub fn new(limits: RateLimits) -> Self {
        Self { limits, clients: Mutex::default() }
    }

    /// Returns the client's buckets; none without limits.
    pub fn buckets(&self, id: ClientId, now: Instant) -> Option<Arc<RateBuckets>> {
        if self.limits == RateLimits::default() {
            return None;
        }
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if clients.len() >= ADDRESSES_MAX && matches!(id, ClientId::Address(_)) && !clients.contains_key(&id) {
            let seen = |client: &RateBuckets| client.0.lock().unwrap_or_else(PoisonError::into_inner).seen;
            let coldest = clients.iter().min_by_key(|(_, client)| seen(client)).map(|(id, _)| *id);
            coldest.into_iter().for_each(|id| drop(clients.remove(&id)));
        }
        Some(Arc::clone(clients.entry(id).or_insert_with(|| RateBuckets::new(self.limits, now))))
    }

    #[cfg(test)]
    fn known(&self) -> usize {
        self.clients.lock().unwrap().len()
    }
}

impl RateLimits {
    /// Returns the most heap bytes of the remembered clients.
    pub(crate) fn heap_bytes_max(&self, keys: usize) -> u64 {
        let clients = if *self == Self::default() { 0 } else { keys.max(ADDRESSES_MAX) };
        clients as u64 * CLIENT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(requests: Option<u32>, tokens: Option<u64>) -> RateLimits {
        RateLimits { requests, tokens }
    }

    #[test]
    fn a_bucket_gives_what_a_minute_brings_and_no_more() {
        let start = Instant::now();
        let client = RateBuckets::new(limits(Some(6), None), start);
        for _ in 0..6 {
            client.take_request(start).unwrap();
        }
        let refused = client.take_request(start).unwrap_err();
        assert_eq!((refused.status, refused.retry_after_s), (StatusCode::TOO_MANY_REQUESTS, Some(10)));
        assert!(client.take_request(start + Duration::from_secs(9)).is_err());
        client.take_request(start + Duration::from_millis(10_100)).unwrap();
        assert!(client.take_request(start + Duration::from_millis(10_200)).is_err());
        // An hour without requests fills the bucket only once.
        let later = start + Duration::from_secs(3600);
        assert_eq!((0..20).filter(|_| client.take_request(later).is_ok()).count(), 6);
    }

    #[test]
    fn tokens_may_run_into_debt_and_are_paid_off() {
        let client = RateBuckets::new(limits(None, Some(600)), Instant::now());
        client.take_request(Instant::now()).unwrap();
        client.charge(1200);
        let refused = client.take_request(Instant::now()).unwrap_err();
        assert!((55..=61).contains(&refused.retry_after_s.unwrap()), "{refused:?}");
        assert!(client.take_request(Instant::now() + Duration::from_secs(62)).is_ok());
    }

    #[test]
    fn addresses_are_bounded_and_the_coldest_goes() {
        let rates = Rates::new(limits(Some(1), None));
        let start = Instant::now();
        let address = |i: u32| ClientId::address(IpAddr::from(i.to_be_bytes()));
        for i in 0..3 * ADDRESSES_MAX as u32 {
            let now = start + Duration::from_millis(i.into());
            rates.buckets(address(i), now).unwrap().take_request(now).unwrap();
            // This address stays in use.
            drop(rates.buckets(address(0), now).unwrap().buckets(now));
        }
        assert_eq!(rates.known(), ADDRESSES_MAX);
        assert!(rates.clients.lock().unwrap().contains_key(&address(0)));
        let one = ClientId::address("2001:db8::1".parse().unwrap());
        assert_eq!(one, ClientId::address("2001:db8::ffff:2".parse().unwrap()), "one network");
        assert_eq!(ClientId::address("::ffff:1.2.3.4".parse().unwrap()), ClientId::address("1.2.3.4".parse().unwrap()));
        assert!(Rates::new(RateLimits::default()).buckets(one, start).is_none());
    }
}
