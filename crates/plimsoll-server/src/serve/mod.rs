//! From a connection to a handler: the listener, the middleware and the routes.

pub(crate) mod connection;
pub(crate) mod http2;
pub(crate) mod listen;
pub(crate) mod middleware;
pub(crate) mod router;
pub(crate) mod socket;
