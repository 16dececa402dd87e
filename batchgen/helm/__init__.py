"""HELM (crfm-helm 0.5.16) on batchgen: `runner.BatchgenRunner`, `client.BatchgenClient`, `tokenizer.BatchgenTokenizer`.

    helm-run --runner-class-name batchgen.helm.runner.BatchgenRunner --local-path DIR ...

where DIR/model_deployments.yaml names the client and DIR/tokenizer_configs.yaml the tokenizer (recipes/helm has both).
`rows` and `jobs` do not import HELM: the rows of a request, and the jobs that answer them.
"""
