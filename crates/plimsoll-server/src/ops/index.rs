//! `GET /v1`: the list of routes, for a browser at the API's base and for programs that look for a Plimsoll server.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;

use crate::http::json::json;
use crate::ops::openapi;
use crate::state::model::ModelState;
use crate::state::server::ServerState;

#[derive(Serialize)]
struct Index<'a> {
    server: &'static str,
    version: &'static str,
    models: Vec<&'a str>,
    page: &'static str,
    openapi: &'static str,
    documentation: &'static str,
    routes: Vec<Route>,
}

#[derive(Serialize)]
struct Route {
    method: String,
    path: String,
    summary: String,
}

/// Returns the page of a server with models of these names.
pub(crate) fn page(server: &ServerState, models: Vec<&str>) -> Response {
    let routes = openapi::routes(server.several);
    let route = |(method, path, summary)| Route { method, path, summary };
    let index = Index {
        server: "plimsoll",
        version: env!("CARGO_PKG_VERSION"),
        models,
        page: "/",
        openapi: "/openapi.json",
        documentation: concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/api.md"),
        routes: routes.into_iter().map(route).collect(),
    };
    json(&index, None)
}

/// The handler of a server with one model.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>) -> Response {
    page(&state.server, state.served.names.iter().map(String::as_str).collect())
}
