"""The report of one or several runs: a single HTML page without a network.

    run_records  reads the records of a run          metrics.jsonl, config.yaml, goodput/, run.json
    series       puts the metrics into charts        loss, throughput, …; steps, tokens and hours
    sections     everything that is no curve         memory, goodput, schedules, configs, machines
    page         one HTML file                       data as JSON, and the files *.js and page.css

The scripts build the page from the data. No text of a run becomes HTML: the data is JSON in which
`<` is escaped, and the scripts set the text of elements, never their HTML.
"""
