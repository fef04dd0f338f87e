# Engine and workers of FlowKit, with the demo's handlers. `flowkit` is the entry point:
#   docker run --rm flowkit-temporal worker --help
#
# The build needs both ends of the links in src/flowkit (workflows, activities, adapters, bridge), so its context is
# the root of the checkout; .dockerignore lists what goes in.

FROM python:3.12-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/flowkit
WORKDIR /src
# The dependencies first: this layer is built again only when pyproject.toml has changed.
COPY pyproject.toml README.md LICENSE ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*p['dependencies'], *e['admission'], *e['gateway'], *e['observe'], sep='\n')" > requirements.txt \
    && /opt/flowkit/bin/pip install -r requirements.txt
COPY workflows ./workflows
COPY activities ./activities
COPY adapters ./adapters
COPY bridge ./bridge
COPY src ./src
RUN /opt/flowkit/bin/pip install --no-deps . \
    && /opt/flowkit/bin/python -c "import flowkit.workflows.task, flowkit.activities.role_attempt, flowkit.adapters.tasks.store, flowkit.bridge"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 flowkit
COPY --from=build /opt/flowkit /opt/flowkit
COPY examples /app/examples
COPY deploy/demo_task.py /app/deploy/
ENV PATH=/opt/flowkit/bin:$PATH PYTHONPATH=/app/examples PYTHONUNBUFFERED=1
WORKDIR /app
USER flowkit
ENTRYPOINT ["flowkit"]
CMD ["engine"]
