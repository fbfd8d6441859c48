//! Small things that Anthropic's bodies are full of.

use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;

/// Takes a `cache_control` mark. Prefixes are cached without one, for as long as there is room, so that a mark is met by
/// what is done anyway; it decides how the prompt's tokens are counted.
pub(crate) fn cache_control(fields: &mut Fields<'_>) -> ApiResult<bool> {
    let path = fields.param("cache_control");
    let Some(raw) = fields.raw("cache_control") else { return Ok(false) };
    let mut mark = Fields::of(path, raw)?;
    let at = mark.param("type");
    if mark.required::<String>("type")? != "ephemeral" {
        return Err(ApiError::unsupported(at.clone(), format!("{at} must be \"ephemeral\"")));
    }
    mark.only("ttl", &["\"5m\"", "\"1h\""])?;
    mark.finish()?;
    Ok(true)
}
