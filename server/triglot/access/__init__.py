"""Who may make a call: the `Authorizer` of an access file, with tokens, certificates and quotas. A part."""
